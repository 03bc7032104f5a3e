"""A machine with fake GPUs: a CUDA driver that fails as told, and a recording nvidia-smi."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "src" / "saferun" / "gpu" / "preflight.py"
SOURCE = Path(__file__).with_name("fakes") / "libcuda.c"

CARD = """\
GPU {bus}
    Product Name                          : NVIDIA Fake
    Persistence Mode                      : {persistence}
    MIG Mode
        Current                           : {mig}
        Pending                           : {pending}
    GPU UUID                              : {uuid}
    Minor Number                          : {minor}
    GPU Recovery Action                   : {action}
    FB Memory Usage
        Total                             : 143771 MiB
        Used                              : {used} MiB
    Processes{processes}
"""
PROCESS = """
        GPU instance ID                   : N/A
        Process ID                        : {pid}
            Type                          : C
            Name                          : {name}
            Used GPU Memory               : {used} MiB"""


def uuid(number: int) -> str:
    """Return the UUID of the fake driver's GPU."""
    byte = f"{0x11 * (number + 1) & 0xFF:02x}"
    return "GPU-" + "-".join(byte * count for count in (4, 2, 2, 2, 6))


def compiled(folder: Path) -> Path:
    """Return a directory with the fake libcuda.so.1; skip where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    library = folder / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    return folder


def try_gpus(library: Path | str, timeout_s: float = 20, **behaviour: str) -> dict:
    """Run the preflight's program by its path; return its document and its exit status."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(PROGRAM), "--timeout", str(timeout_s)],
        env={"LD_LIBRARY_PATH": str(library), **behaviour},
        capture_output=True,
        text=True,
        timeout=60,
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
            '-q) n=$(cat "$here/looks" 2>/dev/null || echo 0); echo $((n + 1)) > "$here/looks"\n'
            '    cat "$here/report.$n" 2>/dev/null || cat "$here/report" ;;\n'
            'esac\n[ -f "$here/$1.status" ] && exit "$(cat "$here/$1.status")"'
        )
        self.lists(2)

    def behaves(self, script: str) -> None:
        """Do this when called; what was asked is written down first."""
        text = f'#!/bin/sh\nhere={self.folder}\necho "$@" >> $here/asked\n{script}\nexit 0\n'
        self.program.write_text(text)
        self.program.chmod(0o755)

    def lists(self, count: int, name: str = "NVIDIA H100 80GB HBM3") -> None:
        lines = [f"GPU {n}: {name} (UUID: {uuid(n)})" for n in range(count)]
        (self.folder / "list").write_text("\n".join(lines) + "\n")

    def reports(self, *cards: str, look: int | None = None) -> None:
        """Answer -q with these cards; `look` is the number of the question, None for all others."""
        name = "report" if look is None else f"report.{look}"
        head = "==============NVSMI LOG==============\nDriver Version : 580.65.06\n"
        (self.folder / name).write_text(head + "".join(cards))

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text().splitlines() if path.exists() else []


def card(number: int = 0, holders: dict[int, str] | None = None, **told: str) -> str:
    """Return one GPU of `nvidia-smi -q`."""
    processes = "".join(
        PROCESS.format(pid=pid, name=name, used=70000) for pid, name in (holders or {}).items()
    )
    known = {
        "bus": f"00000000:{0x1A + number:02X}:00.0",
        "persistence": "Enabled",
        "mig": "Disabled",
        "uuid": uuid(number),
        "minor": str(number),
        "action": "None",
        "used": "3",
        "processes": processes or "                             : None",
    }
    return CARD.format(**{"pending": told.get("mig", "Disabled"), **known, **told})


class Machine:
    """A machine with fake GPUs, and saferun on it."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.smi = Smi(folder / "bin")
        self.smi.reports(card(0), card(1))
        self.home = folder / "home"
        self.home.mkdir()
        self.environ = {
            "PATH": f"{self.smi.folder}:{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": str(self.home),
            "LD_LIBRARY_PATH": str(library),
            "TMPDIR": str(folder),
            "OMP_NUM_THREADS": "1",
            "SAFERUN_SET": "locks.gpus=off",  # tests run beside each other with the same UUIDs
            **{n: os.environ[n] for n in ("PYTHONPATH", "LANG") if n in os.environ},
        }

    def start(self, *words: str, **behaviour: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "saferun", *words],
            env={**self.environ, **behaviour},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, **behaviour: str) -> Ran:
        with self.start(*words, **behaviour) as process:
            out, err = process.communicate(timeout=60)
        return Ran(process.returncode, out, err, self)


class Ran:
    """A saferun that has ended."""

    def __init__(self, status: int, out: str, err: str, machine: Machine) -> None:
        self.status, self.out, self.err = status, out, err
        self._machine = machine

    @property
    def said(self) -> list[str]:
        lines = self.err.splitlines()
        return [line.removeprefix("saferun: ") for line in lines if line.startswith("saferun: ")]

    def events(self, name: str) -> list[dict]:
        (path,) = self._machine.home.glob(".local/state/saferun/runs/*/events.jsonl")
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return [event for event in events if event["event"] == name]
