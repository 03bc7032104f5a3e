"""A machine on which a bash twin and saferun run side by side, and a torchrun that tells all."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]
SAFERUN = [sys.executable, "-m", "saferun"]
NASTY = "a'b\"c $(touch x) `id` \\ \n\t ünï ; & | > < * ? ~ # ! %s"
MARK = "TWIN_TEST_MARK"
DEADLINE_S = 40

# It records what it got as attempt N, prints what the test wants and ends as the test wants.
TORCHRUN = """#!{python} -IB
import json, os, sys
place, number = os.environ["RECORDS"], os.environ.get("SAFERUN_ATTEMPT", "0")
with open(f"{{place}}/{{number}}.tmp", "w") as file:
    json.dump({{"argv": sys.argv, "env": dict(os.environ), "pid": os.getpid()}}, file)
os.rename(f"{{place}}/{{number}}.tmp", f"{{place}}/{{number}}.json")
ends = json.loads(os.environ.get("ENDS", "[]"))
end = ends[min(int(number), len(ends)) - 1] if ends else {{}}
if end.get("code"):
    exec(end["code"])
sys.stderr.write(end.get("says", ""))
sys.stderr.flush()
sys.exit(end.get("status", 0))
"""
SMI = "#!/bin/sh\n"
SMI_LINE = 'echo "GPU {number}: {name} (UUID: {uuid})"\n'


class Told(NamedTuple):
    """What torchrun got in one attempt, less what must differ between two runs."""

    argv: list[str]
    env: dict[str, str]


class Machine:
    """A home, a working directory, a PATH with a telling torchrun; no saferun on it."""

    def __init__(self, tmp: pathlib.Path) -> None:
        self.tmp = tmp
        self.cwd, self.bin, self.home = tmp / "a work", tmp / "bin", tmp / "home"
        self.temporary = tmp / "tmp dir"
        self.cache = tmp.parent / "cache of parsed files"  # of all tests: for what makes twins
        for place in (self.cwd, self.bin, self.home, self.temporary):
            place.mkdir()
        for name in ("torchrun", "python"):
            self.program(name, TORCHRUN.format(python=sys.executable))
        (self.cwd / "train.py").write_text("")
        self.mark = uuid.uuid4().hex
        self.environ = {
            "HOME": str(self.home),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.temporary),
            MARK: self.mark,
        }

    def program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def gpus(self, count: int = 1, name: str = "NVIDIA H100 80GB HBM3") -> list[str]:
        """Put GPUs into the machine, as its nvidia-smi tells; return their UUIDs."""
        made = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
        lines = [SMI_LINE.format(number=n, name=name, uuid=u) for n, u in enumerate(made)]
        self.program("nvidia-smi", SMI + "".join(lines))
        return made

    def twin(self, *words: str, name: str = "run it.sh", **environ: str) -> pathlib.Path:
        """Make a twin as `saferun gen-shell WORDS` does, and return its path."""
        path = self.cwd / name
        done = self.command("gen-shell", *words, **environ)
        assert done.returncode == 0, done.stderr
        path.write_text(done.stdout)
        return path

    def command(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SAFERUN, *words],
            cwd=self.cwd,
            env={**self.environ, "XDG_CACHE_HOME": str(self.cache), **environ},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def records(self, label: str) -> pathlib.Path:
        place = self.tmp / f"records-{label}"
        place.mkdir(exist_ok=True)
        return place

    def start(
        self, command: Sequence[Any], label: str = "x", /, *, ends: Any = (), **environ: str
    ) -> subprocess.Popen[str]:
        extra = {"RECORDS": str(self.records(label)), "ENDS": json.dumps(list(ends))}
        return subprocess.Popen(
            [str(word) for word in command],
            cwd=self.cwd,
            env={**self.environ, **extra, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # no terminal of ours
        )

    def run(self, command: Sequence[Any], label: str = "x", /, **options: Any) -> Ran:
        with self.start(command, label, **options) as process:
            out, err = process.communicate(timeout=60)
        return Ran(process.returncode, out, err, self.told(label))

    def told(self, label: str) -> dict[int, Told]:
        """Return what torchrun got, by attempt, and forget it."""
        found = {}
        for path in sorted(self.records(label).glob("*.json")):
            got = json.loads(path.read_text())
            found[int(path.stem)] = Told(got["argv"], plain(got["env"]))
            path.unlink()
        return found

    def kits(self) -> list[str]:
        return [p.name for p in self.temporary.iterdir() if p.name.startswith("saferun-kit")]

    def living(self) -> dict[int, str]:
        """Return {pid: name} of the living processes that carry this machine's mark."""
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                place = pathlib.Path("/proc", name)
                if f"{MARK}={self.mark}".encode() not in (place / "environ").read_bytes():
                    continue
                if (place / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found[int(name)] = (place / "comm").read_text().strip()
        return found


class Ran(NamedTuple):
    """A run that has ended."""

    status: int
    out: str
    err: str
    told: dict[int, Told]

    @property
    def said(self) -> list[str]:
        """What saferun said, less where its files are."""
        lines = [line for line in self.err.splitlines() if line.startswith("saferun: ")]
        return [line for line in lines if not line.startswith("saferun: journal: ")]


def plain(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment less what names this very run: its id, its places, its pid."""
    env = {name: value for name, value in env.items() if name != "RECORDS"}
    if "SAFERUN_INJECT" in env:
        contract = json.loads(env["SAFERUN_INJECT"])
        receipts, run = contract.pop("receipts"), contract.pop("run")
        assert receipts is None or receipts.endswith(f"/{run}/receipts")
        env["SAFERUN_INJECT"] = json.dumps(contract, sort_keys=True)
        site, _, rest = env["PYTHONPATH"].partition(":")
        assert os.path.basename(site) == "site"
        env["PYTHONPATH"] = f"SITE:{rest}"
    if "SAFERUN_LOCKS" in env:
        env["SAFERUN_LOCKS"] = env["SAFERUN_LOCKS"].split(":", 2)[2]
    return env


def until(condition: Callable[[], Any], what: object = "", limit_s: float = DEADLINE_S) -> Any:
    """Return the first true value of `condition()`; fail when the time is over."""
    limit = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < limit, f"not within {limit_s} s: {what or condition}"
        time.sleep(0.01)
    return value
