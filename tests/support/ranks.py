"""Jobs for the tests: ranks on gloo with the hooks in place, under torchrun or forked.

Under torchrun a job takes seconds, most of them for imports of torch: `launch`. What does not
depend on torchrun itself runs in forks of an interpreter that has imported torch: `ForkServers`.
"""

import contextlib
import json
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from helpers import apart, living, watched
from interpreters import changed
from sandbox import Sandbox, own_lines, text_of, unquoted, write

from saferun.inject import contract

REPOSITORY = Path(__file__).resolve().parents[2]
SITE = REPOSITORY / "src" / "saferun" / "inject" / "site"
FORK_SERVER = REPOSITORY / "tests" / "programs" / "inject" / "fork_server.py"
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
DEADLINE_S = 400


class Job(NamedTuple):
    """What a finished job left: its status, its streams, its receipts and its orphans."""

    code: int
    out: str
    err: str
    receipts: list[dict[str, Any]]
    orphans: list[str]  # of a job under torchrun

    def messages(self, text: str = "") -> list[str]:
        """The lines that saferun wrote, those with `text` only."""
        return [line for line in own_lines(self.err) if text in line]

    def hook(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.receipts if line["hook"] == name]


RunRanks = Callable[..., Job]  # the fixture `run_ranks`; see ForkServers.run


def hooks(
    init: dict[str, Any] | None = None, order: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The two hooks' settings: the shipped defaults, changed as a test says."""
    return changed({"excepthook": "off", "init": init or {}, "order": order or {}})


def environment(
    settings: dict[str, Any], receipts: Path, mitigations: tuple[str, ...] = ()
) -> dict[str, str]:
    """What a job has in its environment: the hooks, and what they are told."""
    told = contract.encode(
        run="test", attempt=1, hooks=settings, mitigations=mitigations, receipts=str(receipts)
    )
    return {"PYTHONPATH": str(SITE), "SAFERUN_INJECT": told}


def launch(
    folder: Path,
    script: str,
    *arguments: str,
    ranks: int = 2,
    init: dict[str, Any] | None = None,
    launcher: tuple[str, ...] | None = None,
    environ: dict[str, str] | None = None,
    mitigations: tuple[str, ...] = (),
) -> Job:
    """Run `script` as `ranks` ranks under torchrun (or under `launcher`) and wait for its end."""
    path = folder / "train.py"
    write(path, script)
    command = launcher or (TORCHRUN, "--standalone", f"--nproc-per-node={ranks}")
    kept = environment(hooks(init), folder / "receipts", mitigations) | (environ or {})
    with Sandbox(folder, **kept) as box:
        done = box.ran(*command, path, *arguments, start_new_session=True)
        left = orphans(box.mark)
    receipts = read_receipts(folder)
    return Job(done.returncode, _without_gloo(done.stdout), done.stderr, receipts, left)


def _without_gloo(out: str) -> str:
    """Return what the script printed: gloo of torch 2.8 to 2.10 writes to stdout, too."""
    return re.sub(r"^\[Gloo\] Rank .*\n", "", out, flags=re.MULTILINE)


def read_receipts(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "receipts").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in text_of(file).splitlines()]


class ForkServers:
    """Runs scripts as ranks that are forks.

    One server for each set of patches: the order hook has the same for `warn` and `error`, and
    what the init hook does is decided at each call.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._sandbox = folder, Sandbox(folder)
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    def run(
        self,
        folder: Path,
        script: str,
        *argv: str,
        ranks: int = 2,
        init: dict[str, Any] | None = None,
        order: dict[str, Any] | None = None,
        environ: dict[str, str | None] | None = None,
        watched: bool = False,
        **more: Any,
    ) -> Job:
        """Run `script` as `ranks` ranks and wait for their end; a rank that fails ends the rest.

        With 0 ranks it is one process without a group's variables. `more` are settings of other
        hooks; None in `environ` takes a variable away.
        """
        path = folder / "train.py"
        write(path, script)
        for name in ("out", "err"):
            write(folder / name, "")
        job = {
            "folder": str(folder),
            "script": str(path),
            "argv": argv,
            "ranks": ranks,
            "init": init or {},
            "order": order or {},
            "watched": watched,
            "environ": {
                "TORCHINDUCTOR_CACHE_DIR": unquoted(folder / "inductor"),
                **(environ or {}),
            },
        }
        mode = (order or {}).get("mode", "warn")
        patches = hooks(None, {"mode": "warn" if mode == "error" else mode}) | more
        code = self._ask(json.dumps(patches), json.dumps(job))
        out, err = (text_of(folder / name) for name in ("out", "err"))
        return Job(code, _without_gloo(out), err, read_receipts(folder), [])

    def _ask(self, patches: str, job: str) -> int:
        server = self._servers.get(patches) or self._start(patches)
        server.stdin.write(job.encode() + b"\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], DEADLINE_S)[0]:
            self.close()
            raise AssertionError(f"still running after {DEADLINE_S} s: {job}")
        return int(server.stdout.readline())

    def _start(self, patches: str) -> subprocess.Popen[bytes]:
        settings = json.loads(patches)
        modules = ["torch", "torch._dynamo", "torch.distributed.fsdp"]  # what ranks need, once
        if settings["compile"] != hooks()["compile"]:
            modules = ["torch._inductor.compile_fx"]
        server = self._servers[patches] = self._sandbox.popen(
            *(sys.executable, FORK_SERVER, *modules),
            env=environment(settings, self._folder),
            stdin=subprocess.PIPE,
            stderr=None,
            start_new_session=True,  # a script may signal its group
        )
        del watched[server]
        apart.add(server.pid)
        return server

    def close(self) -> None:
        self._sandbox.close()
        self._servers.clear()


# What needs one server of its own together: a start of a server takes seconds.
WHEN_DISTRIBUTED = {"cudagraphs": "off-when-distributed", "fallback": "on"}


def runner(forks: ForkServers, folder: Path) -> Callable[..., Job]:
    """Runs a script in one process, no rank, under settings of the compile hook alone."""

    def run(script: str, settings: dict[str, str], **environ: str) -> Job:
        return forks.run(folder, script, ranks=0, environ=environ, **compiling(settings))

    return run


def compiling(settings: dict[str, str]) -> dict[str, Any]:
    """Return the hooks' settings of a server whose compile hook has these."""
    return {
        "order": {"mode": "off"},
        "compile": {**hooks()["compile"], **settings},
        "cudagraph_markers": "off-when-distributed",
    }


def orphans(mark: str, patience_s: float = 5.0) -> list[str]:
    """The command lines of processes of a job that outlive it."""
    end = time.monotonic() + patience_s
    while living(mark) and time.monotonic() < end:
        time.sleep(0.05)
    left = []
    for pid in living(mark):
        with contextlib.suppress(OSError):
            left.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return left


def line_of(script: str, text: str) -> int:
    """The number of the line of `script` that holds `text`."""
    return next(n for n, line in enumerate(script.splitlines(), 1) if text in line)
