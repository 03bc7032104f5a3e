"""Provokes failures on two CPU ranks and records their output in `tests/records/provoked`.

    python tools/record_logs.py                       all that this interpreter's packages can have
    python tools/record_logs.py --python PATH NAME…   some of them, with another torch
    python tools/record_logs.py --table               the rows of tests/mitigations/table.py

What is provoked, and what it must be taken for, stands in tests/support/provoked.py. Paths of this
machine and its name are replaced. A framework that is missing leaves its logs as they are.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("support", "mitigations")]

import provoked  # noqa: E402 - the path is set above
import surroundings  # noqa: E402 - the path is set above
import table  # noqa: E402 - the path is set above

KEPT = ("LANG", "LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR")  # DeepSpeed builds for minutes, once
LIMIT_S = 150.0
MOST_BYTES = 24_000  # of a log; the middle of a longer one is left out


def main() -> int:
    """Record; return 1 where a program did not fail or did not end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of the environment to run in")
    parser.add_argument("--table", action="store_true", help="the mitigation table instead")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    wrong = 0
    if options.table:
        cases = [case for case in table.CASES if not (case.needs and not case.needs())]
        for case in (c for c in cases if not options.names or c.kind in options.names):
            wrong += not record_row(options.python, case)
        return int(wrong > 0)
    for one in provoked.FAILURES:
        chosen = one.name in options.names if options.names else has(options.python, one)
        if chosen:
            wrong += not record(options.python, one)
    return int(wrong > 0)


def has(python: str, one: provoked.ProvokedFailure) -> bool:
    """Return whether an environment has what a failure needs."""
    if one.program == provoked.TORCH:
        return True
    package = {"trainer": "transformers"}.get(one.words[0], one.words[0])
    check = f"import importlib.util as u; raise SystemExit(u.find_spec({package!r}) is None)"
    return subprocess.run([python, "-c", check]).returncode == 0


def record(python: str, one: provoked.ProvokedFailure) -> bool:
    """Run a failure and write its log; return whether it failed in time."""
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        command = [tool(python, one.launcher[0]), *one.launcher[1:]]
        command += [str(ROOT / "tools" / "programs" / "records" / one.program), *one.words]
        return write(one.name, python, folder, command)


def record_row(python: str, case: table.Case) -> bool:
    """The same for a row of the mitigation table, under torchrun."""
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        own = pathlib.Path(folder, "own")
        own.mkdir()
        with case.around(own) as setup:
            command = [tool(python, "torchrun"), f"--nproc-per-node={case.ranks}", *setup.options]
            command += [str(surroundings.HERE / case.program), *setup.args]
            more = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache", **setup.env}
            return write(
                f"{provoked.TABLE}-{case.kind}", python, folder, command, more, setup.preexec
            )


def tool(python: str, name: str) -> str:
    """Return a program of an environment; its interpreter for "python"."""
    return python if name == "python" else os.path.join(os.path.dirname(python), name)


def write(
    name: str,
    python: str,
    folder: str,
    command: list[str],
    more: dict[str, str] | None = None,
    preexec: Callable[[], object] | None = None,
) -> bool:
    """Run a command and write its log, if it fails in time.

    Args:
        name: of the log.
        python: of the environment.
        folder: for its files; empty.
        command: that fails.
        more: variables.
        preexec: runs in the child before the command.

    Returns:
        Whether it failed.
    """
    kept = {key: os.environ[key] for key in KEPT if key in os.environ}
    path = os.pathsep.join((os.path.dirname(python), "/usr/bin", "/bin"))
    env = {**kept, "PATH": path, "HOME": folder, "TMPDIR": folder, "COLUMNS": "100",
           "PYTHONPATH": str(surroundings.HERE), "DS_ACCELERATOR": "cpu",
           "RECORD_FOLDER": folder, "ACCELERATE_USE_CPU": "1", **(more or {})}  # fmt: skip
    status, rows = output_of(command, env, folder, preexec)
    print(f"{name}: status {status}, {len(rows)} lines", flush=True)
    if not status:
        return False
    masked = [f"{stream}|{text}" for stream, text in mask(rows, python, folder)]
    provoked.LOGS.mkdir(exist_ok=True)
    text = "\n".join(shortened(masked)) + "\n"
    (provoked.LOGS / f"{name}.log").write_text(text, encoding="utf-8")
    return True


def output_of(
    command: list[str], env: dict[str, str], folder: str, preexec: Callable[[], object] | None
) -> tuple[int | None, list[tuple[str, bytes]]]:
    """Run a command; return its status (None where it was ended after LIMIT_S) and its lines.

    Args:
        command: to run.
        env: its environment.
        folder: its working directory.
        preexec: runs in the child before the command.
    """
    with subprocess.Popen(
        command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=preexec, start_new_session=True,
    ) as job:  # fmt: skip
        rows = list(arriving(job, time.monotonic() + LIMIT_S))
        try:
            status = job.wait(5)
        except subprocess.TimeoutExpired:
            job.terminate()  # torchrun ends its ranks then, which are in sessions of their own
            status = None
    return status, rows


def arriving(job: subprocess.Popen[bytes], until: float) -> Iterable[tuple[str, bytes]]:
    """Yield stream and text of each line until both streams end or the time is over."""
    assert job.stdout is not None
    assert job.stderr is not None
    parts = {"o": b"", "e": b""}
    with selectors.DefaultSelector() as open_ones:
        open_ones.register(job.stdout, selectors.EVENT_READ, "o")
        open_ones.register(job.stderr, selectors.EVENT_READ, "e")
        while open_ones.get_map() and time.monotonic() < until:
            for key, _ in open_ones.select(1.0):
                chunk = os.read(key.fd, 1 << 16)
                if not chunk:
                    open_ones.unregister(key.fileobj)
                *whole, parts[key.data] = (parts[key.data] + chunk).split(b"\n")
                yield from ((key.data, line) for line in whole)
    yield from ((stream, rest) for stream, rest in parts.items() if rest)


def mask(rows: Iterable[tuple[str, bytes]], python: str, folder: str) -> list[tuple[str, str]]:
    """Return the lines without what belongs to this machine.

    Args:
        rows: stream and text.
        python: of the environment.
        folder: of the run.
    """
    base = subprocess.run(
        [python, "-c", "import sys; print(sys.prefix, sys.base_prefix)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    names = [
        (folder, "/home/user/run"),
        (str(ROOT / "tests"), "/home/user/job"),
        (str(ROOT / "tools"), "/home/user/job"),
        (base[0], "/home/user/venv"),
    ]
    if base[1] != "/usr":
        names.append((base[1], "/usr"))
    host = re.compile(rf"\b{re.escape(socket.gethostname())}\b")
    found = []
    for stream, row in rows:
        text = row.decode("utf-8", "replace")
        for path, instead in names:
            text = text.replace(path, instead)
        found.append((stream, host.sub("node-1", text)))
    return found


def shortened(rows: list[str]) -> list[str]:
    """Leave out the middle of a long log: a quarter of what is kept is its start."""

    def within(part: Iterable[str], limit: int) -> list[str]:
        kept, size = [], 0
        for row in part:
            size += len(row) + 1
            if size > limit:
                break
            kept.append(row)
        return kept

    if sum(len(row) + 1 for row in rows) <= MOST_BYTES:
        return rows
    head = within(rows, MOST_BYTES // 4)
    return head + within(reversed(rows[len(head) :]), MOST_BYTES * 3 // 4)[::-1]


if __name__ == "__main__":
    sys.exit(main())
