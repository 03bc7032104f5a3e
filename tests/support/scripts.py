"""A machine on which a bash script of gen-shell and saferun run side by side, with a torchrun that
records what it gets.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from command import Ended, call
from helpers import DEADLINE_S, until
from repo import ROOT, source
from sandbox import Sandbox, nvidia_smi, own_lines, python_program

BASH = os.environ.get("TEST_BASH", "bash")  # another one, such as 4.2
NASTY = "a'b\"c $(touch x) `id` \\ \n\t ünï ; & | > < * ? ~ # ! %s"

PROGRAMS = ROOT / "tests" / "programs" / "export"
RECORDING = source("export/recording_torchrun")
TORCHRUN = python_program(RECORDING, "-IB")
STAYS = [{"program": str(PROGRAMS / "stay.py")}]


class Received(NamedTuple):
    """What torchrun got in one attempt, less what must differ between two runs."""

    argv: list[str]
    env: dict[str, str]


class Machine(Sandbox):
    """A home, a working directory, a PATH with a recording torchrun; no saferun on it."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.temporary = folder / "tmp dir"
        self.temporary.mkdir()
        super().__init__(folder, cwd=folder / "a work", path=(), TMPDIR=str(self.temporary))
        self.cache = folder.parent / "cache of parsed files"  # of all tests: for what makes scripts
        for name in ("torchrun", "python"):
            self.program(name, TORCHRUN)
        (self.cwd / "train.py").write_text("", encoding="utf-8")

    def gpus(self, count: int = 1, name: str = "NVIDIA H100 80GB HBM3") -> list[str]:
        """Put GPUs into the machine, as its nvidia-smi lists them; return their UUIDs."""
        made = [f"GPU-{uuid.uuid4()}" for _ in range(count)]
        nvidia_smi(self.bin, *(f'echo "GPU {n}: {name} (UUID: {u})"' for n, u in enumerate(made)))
        return made

    def script(self, *argv: str, name: str = "run it.sh", **environ: str) -> pathlib.Path:
        """Make a script as `saferun gen-shell ARGV` does, and return its path."""
        path = self.cwd / name
        done = self.gen_shell(*argv, **environ)
        assert done.returncode == 0, done.stderr
        path.write_text(done.stdout, encoding="utf-8")
        return path

    def gen_shell(self, *argv: str, **environ: str) -> Ended:
        """Call `saferun gen-shell ARGV` in this process."""
        return self.command("gen-shell", *argv, **environ)

    def command(self, *argv: str, **environ: str) -> Ended:
        """Call `saferun ARGV` in this process."""
        environ = {**self.environ, "XDG_CACHE_HOME": str(self.cache), **environ}
        return call(*argv, environ=environ, cwd=self.cwd)

    def records(self, label: str) -> pathlib.Path:
        place = self.folder / f"records-{label}"
        place.mkdir(exist_ok=True)
        return place

    def start(
        self, command: Sequence[Any], label: str = "x", /, *, ends: Any = (), **environ: str
    ) -> subprocess.Popen[str]:
        extra = {"RECORDS": str(self.records(label)), "ENDS": json.dumps(list(ends))}
        words = [BASH if argument == "bash" else argument for argument in command]
        env = {**extra, **environ}
        return self.popen(*words, env=env, text=True, start_new_session=True)  # no terminal

    def run(self, command: Sequence[Any], label: str = "x", /, **options: Any) -> Ran:
        with self.start(command, label, **options) as process:
            out, err = process.communicate(timeout=DEADLINE_S)
        return Ran(process.returncode, out, err, self.received(label))

    def received(self, label: str) -> dict[int, Received]:
        """Return what torchrun got, by attempt, and forget it."""
        found = {}
        for path in sorted(self.records(label).glob("*.json")):
            got = json.loads(path.read_text(encoding="utf-8"))
            found[int(path.stem)] = Received(got["argv"], plain(got["env"]))
            path.unlink()
        return found

    def unpacked(self) -> list[str]:
        """Return the directories into which a script has unpacked what travels in it."""
        return [p.name for p in self.temporary.iterdir() if p.name.startswith("saferun-kit")]


class Ran(NamedTuple):
    """A run that has ended."""

    status: int
    out: str
    err: str
    received: dict[int, Received]

    @property
    def messages(self) -> list[str]:
        """The lines that saferun wrote, less where its files are."""
        return [line for line in own_lines(self.err) if not line.startswith("saferun: journal: ")]


def plain(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment less what names this very run: its id, its places, its pid."""
    env = {name: value for name, value in env.items() if name != "RECORDS"}
    if "SAFERUN_INJECT" in env:
        contract = json.loads(env["SAFERUN_INJECT"])
        receipts, run = contract.pop("receipts"), contract.pop("run")
        assert receipts is None or receipts.endswith(f"/{run}/receipts")
        assert contract.pop("state", f"/{run}/state").endswith(f"/{run}/state")
        env["SAFERUN_INJECT"] = json.dumps(contract, sort_keys=True)
        own = os.path.dirname(receipts or "/")
        env = {name: value.replace(f"{own}/flight/", "FLIGHT/") for name, value in env.items()}
        site, _, rest = env["PYTHONPATH"].partition(":")
        assert os.path.basename(site) == "site"
        env["PYTHONPATH"] = f"SITE:{rest}"
    if "SAFERUN_LOCKS" in env:
        env["SAFERUN_LOCKS"] = env["SAFERUN_LOCKS"].split(":", 2)[2]
    return env


def up(machine: Machine, label: str = "x"):
    return until((machine.records(label) / "up").exists, "the job is up")


def signals(machine: Machine, label: str = "x") -> str:
    path = machine.records(label) / "signals"
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    err = process.communicate()[1]
    return process.returncode, err
