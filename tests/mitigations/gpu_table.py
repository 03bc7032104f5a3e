"""The rows of the mitigation table that need a GPU; table.py says what a row is.

Where a driver, a compiler or a kernel has to fail, the program says what is planted in it. What
follows from that is the real thing: the driver's refusal, torch's words, the mitigation.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from surroundings import Around, Setup, nothing
from table import Case

HELD_S = 20.0
HOLDER = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(int(0.9 * free), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
OLD_PTXAS = """#!/bin/sh
case "$*" in
  *--version*) echo 'Cuda compilation tools, release 12.0, V12.0.140' ;;
  *) echo "ptxas fatal   : Value 'sm_90a' is not defined for option 'gpu-name'" >&2; exit 255 ;;
esac
"""


@contextlib.contextmanager
def shared_gpu(folder: Path) -> Iterator[Setup]:
    """Another process has nine tenths of the GPU, and leaves after a while."""
    argv = [sys.executable, "-c", HOLDER]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, text=True, **streams) as holder:
        assert holder.stdin
        assert holder.stdout
        leaves = threading.Timer(HELD_S, holder.stdin.close)
        try:
            assert holder.stdout.readline() == "held\n"
            leaves.start()
            yield Setup()
        finally:
            leaves.cancel()
            holder.kill()


@contextlib.contextmanager
def old_ptxas(folder: Path) -> Iterator[Setup]:
    """The assembler that Triton is told to use says what one says that is older than the GPU."""
    path = folder / "ptxas"
    path.write_text(OLD_PTXAS, encoding="utf-8")
    path.chmod(0o755)
    names = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")
    yield Setup(args=("cuda",), env=dict.fromkeys(names, str(path)))


def compiled(kind: str, program: str, *mitigations: str, around: Around | None = None) -> Case:
    """Return a row about the compiler whose mitigation leaves it on."""
    around = around or nothing()
    return Case(
        kind, program, mitigations, "compiled 1 graph", "it stays compiled", around, 1, gpus=1
    )


def refused(kind: str, when: str) -> Case:
    """Return a row of a kernel that is refused whatever is tuned."""
    around, tried = nothing(args=(when,)), ("autotune-off", "compile-off")
    return Case(
        kind, "gpu_launch.py", tried, "mean 1", "the result", around, 1, healthy=around, gpus=1
    )


def passing(kind: str, around: Around, show: str) -> Case:
    """Return a row that another attempt is all the mitigation of."""
    program = "gpu_kernel_dies.py"
    return Case(kind, program, (), show, "every setting", around, 1, healthy=around, gpus=1)


def stopped(kind: str, program: str) -> Case:
    """Return a row of a failure that is the script's own."""
    return Case(kind, program, (), "never", "", nothing(), ranks=1, stops=True, gpus=1)


LARGE = [  # most of the GPU's memory: one at a time, with room for small ones beside
    Case(
        "cuda-oom-fragmentation",
        "gpu_fragmentation.py",
        ("expandable-segments",),
        "has True",
        "what the script allocates",
        nothing(),
        ranks=1,
        gpus=1,
    ),
    Case(
        "cuda-oom-other-process",
        "gpu_share.py",
        (),
        "has True",
        "every setting",
        shared_gpu,
        ranks=1,
        gpus=1,
    ),
]
WHOLE = [stopped("cuda-oom", "gpu_out_of_memory.py")]  # nothing beside
LIGHT = [  # all at a time
    compiled("inductor-autotune-error", "gpu_autotune.py", "autotune-off"),
    compiled("cudagraph-capture-failed", "gpu_capture.py", "cudagraphs-off"),
    Case(
        "nccl-socket-interface",
        "gpu_meet.py",
        ("nccl-socket-interface",),
        "met 1 of 1",
        "the backend",
        nothing(NCCL_SOCKET_IFNAME="eth97"),
        ranks=1,
        gpus=1,
    ),
    refused("triton-launch-error", "launch"),
    refused("triton-out-of-resources", "load"),
    compiled("cudagraph-output-overwritten", "gpu_overwritten.py", "cudagraphs-off"),
    Case(
        "triton-ptxas-arch",
        "compile_one.py",
        ("compile-off",),  # newer-ptxas where the machine has a toolkit, which this one has not
        "mean 1",
        "the result",
        old_ptxas,
        ranks=1,
        healthy=nothing(args=("cuda",)),
        gpus=1,
    ),
    passing("cuda-launch-failure", nothing(args=("trap",)), "done after 1"),
    passing("cuda-illegal-access-sporadic", nothing(args=("stray",)), "done after 600"),
    stopped("device-side-assert", "gpu_assert.py"),
]
CASES = LARGE + WHOLE + LIGHT
