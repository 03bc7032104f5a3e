"""A machine with fake GPUs: a CUDA driver that fails as told, and a recording nvidia-smi."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
from repo import ROOT
from runs import Run, executable, run

from saferun.model import PROBLEM, Gpu, GpuFacts

PROGRAM = ROOT / "src" / "saferun" / "gpu" / "preflight" / "preflight.py"
SOURCE = Path(__file__).with_name("fakes") / "libcuda.c"


def uuid(number: int) -> str:
    """Return the UUID of the fake driver's GPU."""
    byte = f"{0x11 * (number + 1) & 0xFF:02x}"
    return "GPU-" + "-".join(byte * count for count in (4, 2, 2, 2, 6))


A, B, C = map(uuid, range(3))
THREE = GpuFacts(tuple(Gpu(n, uuid(n), "NVIDIA Fake") for n in range(3)), "proc")


def compiled(folder: Path, source: Path = SOURCE) -> Path:
    """Return a directory with a fake libcuda.so.1; skip where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    return folder


def try_gpus(library: Path | str, timeout_s: float = 20, **behaviour: str) -> dict:
    """Run the preflight's program by its path; return its document and its exit status."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PROGRAM), "--timeout", str(timeout_s)],
        env={"LD_LIBRARY_PATH": str(library), **behaviour},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert not done.stderr, done.stderr
    return {**json.loads(done.stdout), "status": done.returncode}


class Smi:
    """An nvidia-smi that writes down what it is asked and answers from files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.program = folder / "nvidia-smi"
        self.behaves(
            'case "$1" in\n'
            '-L) cat "$here/list" ;;\n'
            '--query-gpu=uuid,memory*) cat "$here/memory" ;;\n'
            '--query-gpu*) n=$(cat "$here/looks" 2>/dev/null || echo 0)\n'
            '    echo $((n + 1)) > "$here/looks"; echo "$n" > "$here/look"\n'
            '    cat "$here/report.$n" 2>/dev/null || cat "$here/report" ;;\n'
            '--query-compute*) n=$(cat "$here/look")\n'
            '    cat "$here/apps.$n" 2>/dev/null || cat "$here/apps" ;;\n'
            'esac\n[ -f "$here/$1.status" ] && exit "$(cat "$here/$1.status")"'
        )
        self.lists(2)

    def behaves(self, script: str) -> None:
        """Do this when called; what was asked is written down first."""
        text = f'#!/bin/sh\nhere={self.folder}\necho "$@" >> $here/asked\n{script}\nexit 0\n'
        executable(self.program, text)

    def lists(self, count: int, name: str = "NVIDIA H100 80GB HBM3") -> None:
        lines = [f"GPU {n}: {name} (UUID: {uuid(n)})" for n in range(count)]
        (self.folder / "list").write_text("\n".join(lines) + "\n")

    def reports(self, *cards: Card, look: int | None = None) -> None:
        """Answer with these GPUs; `look` is the number of the question, None for all others."""
        ending = "" if look is None else f".{look}"
        (self.folder / f"report{ending}").write_text("".join(card.state for card in cards))
        (self.folder / f"apps{ending}").write_text("".join(card.apps for card in cards))

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


class Card(NamedTuple):
    """What nvidia-smi answers about one GPU: a row of its state, and rows of its processes."""

    state: str
    apps: str


def card(number: int = 0, holders: Iterable[int] = (), **reported: str) -> Card:
    """Return a GPU's answers; the fields are those of saferun.gpu.nvidia_smi.QUERY."""
    known = {
        "uuid": uuid(number),
        "bus": f"00000000:{0x1A + number:02X}:00.0",
        "used": "3",
        "persistence": "Enabled",
        "mig": "Disabled",
        "pending": reported.get("mig", "Disabled"),
        "action": "None",
        **reported,
    }
    state = "{uuid}, {bus}, {used} MiB, {persistence}, {mig}, {pending}, {action}\n"
    apps = "".join(f"{known['uuid']}, {pid}, 70000\n" for pid in holders)
    return Card(state.format(**known), apps)


def driver_files(folder: Path, count: int = 2) -> Path:
    """Write the kernel driver's files of some GPUs; return the directory in /proc's place."""
    for number in range(count):
        place = folder / "gpus" / f"0000:{0x1A + number:02x}:00.0"
        place.mkdir(parents=True)
        lines = ["Model: \t\t NVIDIA Fake", f"GPU UUID: \t {uuid(number)}"]
        lines.append(f"Device Minor: \t {number}")
        (place / "information").write_text("\n".join(lines) + "\n")
    return folder


class Machine:
    """A machine with fake GPUs, and saferun on it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.smi = Smi(folder / "bin")
        self.smi.reports(card(0), card(1))
        self.home = folder / "home"
        self.home.mkdir()
        self.runs = self.home / ".local" / "state" / "saferun" / "runs"
        self.environ = {
            "PATH": f"{self.smi.folder}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.home),
            "LD_LIBRARY_PATH": str(library),
            "TMPDIR": str(folder),
            "SAFERUN_SET": "locks.gpus=off",  # tests run beside each other with the same UUIDs
        }

    def start(self, *argv: str, **behaviour: str) -> contextlib.AbstractContextManager[Run]:
        return run(self.folder, *argv, env={**self.environ, **behaviour})

    def run(self, *argv: str, **behaviour: str) -> Ran:
        with self.start(*argv, **behaviour) as job:
            status = job.end()
        messages = [line.removeprefix("saferun: ") for line in job.messages()]
        return Ran(status, job.out, job.err, messages, self._events)

    def _events(self, name: str) -> list[dict]:
        """Return the events of the only run; tests put other journals beside it."""
        (path,) = self.runs.glob("*-*-*/events.jsonl")
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return [event for event in events if event["event"] == name]


class Ran(NamedTuple):
    """A saferun that has ended."""

    status: int
    out: str
    err: str
    messages: list[str]
    events: Callable[[str], list[dict]]


def problems(judged):
    return [finding for finding in judged.findings if finding.level == PROBLEM]
