"""Fakes of the driver: a CUDA library that fails as told, its files, an nvidia-smi that records."""

import shutil
import subprocess
from pathlib import Path

import pytest
from sandbox import executable, shell

from saferun.gpu.preflight import preflight
from saferun.model import PROBLEM, Gpu, GpuFacts

MINOR = 240  # the least of a fake GPU's node; no real one has it
SOURCE = Path(__file__).with_name("fakes") / "libcuda.c"


def uuid(number: int) -> str:
    """Return the UUID of the fake driver's GPU."""
    byte = f"{0x11 * (number + 1) & 0xFF:02x}"
    return "GPU-" + "-".join(byte * count for count in (4, 2, 2, 2, 6))


A, B, C = map(uuid, range(3))
THREE = GpuFacts(tuple(Gpu(n, uuid(n), "NVIDIA Fake") for n in range(3)), "proc")


def compiled(folder: Path, source: Path = SOURCE, name: str = "libcuda.so.1") -> Path:
    """Return a directory with a fake library of the driver; skip where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake driver")
    words = [compiler, "-shared", "-fPIC", "-O1", "-o", folder / name, source]
    subprocess.run(words, check=True)
    return folder


def try_gpus(library: Path | str, timeout_s: float = 20, **behaviour: str) -> dict:
    """Run the test of the GPUs; return its document, and whether all is well."""
    with preflight.PreflightTest({"LD_LIBRARY_PATH": str(library), **behaviour}) as test:
        document = test.report(timeout_s)
    return {**document, "well": preflight.is_well(document)}


class Smi:
    """An nvidia-smi that writes down what it is asked, lists GPUs and resets one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        script = f'here={shell(folder)}\necho "$@" >> "$here/asked"\n'
        script += '[ "$1" = -L ] && cat "$here/list"\n'
        status = '[ -f "$here/$1.status" ] && exit "$(cat "$here/$1.status")"'
        executable(folder / "nvidia-smi", f"#!/bin/sh\n{script}{status}\nexit 0\n")
        self.lists(2)

    def lists(self, count: int, name: str = "NVIDIA H100 80GB HBM3") -> None:
        lines = [f"GPU {n}: {name} (UUID: {uuid(n)})" for n in range(count)]
        (self.folder / "list").write_text("\n".join(lines) + "\n", encoding="utf-8")

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def driver_files(folder: Path, count: int = 2) -> Path:
    """Write the kernel driver's files of some GPUs; return the directory in /proc's place."""
    for number in range(count):
        place = folder / "gpus" / f"0000:{0x1A + number:02x}:00.0"
        place.mkdir(parents=True)
        lines = ["Model: \t\t NVIDIA Fake", f"GPU UUID: \t {uuid(number)}"]
        lines.append(f"Device Minor: \t {MINOR + number}")
        (place / "information").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def problems(judged):
    return [finding for finding in judged.findings if finding.level == PROBLEM]
