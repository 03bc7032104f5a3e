"""Failures that are provoked on two CPU ranks, and what their recorded logs must be taken for.

tools/record_logs.py runs them and writes tests/records/provoked/NAME.log: each line of the output
behind `o|` (stdout) or `e|` (stderr), in the order of arrival.
"""

from pathlib import Path
from typing import NamedTuple

from repo import RECORDS

LOGS = RECORDS / "provoked"
TORCH, FRAMEWORKS = "fails.py", "frameworks.py"  # of tools/programs/records
TABLE = "table"  # a row of tests/mitigations/table.py


TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")
ALONE = ("python",)


class ProvokedFailure(NamedTuple):
    """One failure."""

    name: str
    kind: str
    root: str  # what the root line holds
    rank: int | None  # that failed first, where the log tells
    program: str
    argv: tuple[str, ...]  # of the program
    launcher: tuple[str, ...] = TORCHRUN


# way to fail -> kind, what the root line holds, rank that failed first
_WITH_TORCH: dict[str, tuple[str, str, int | None]] = {
    "key-error": ("user-exception", "KeyError: 'input_ids'", 1),
    "all-ranks": ("user-exception", "mat1 and mat2 shapes cannot be multiplied", None),
    "sigkill": ("host-oom-killed", "-9", 1),
    "sigill": ("illegal-instruction", "-4", 1),
    "sigfpe": ("segfault", "-8", 1),
    "crash": ("segfault", "Segmentation fault", 1),
    "exit": ("child-failed-no-root", "exitcode  : 3", 1),
    "import": ("user-import-error", "flash_attn_of_nowhere", None),
    "missing-file": ("user-missing-file", "No such file or directory", None),
    "permission": ("permission-denied", "Permission denied", None),
    "arguments": ("user-args-error", "unrecognized arguments", None),
    "worker-raises": ("user-exception", "KeyError: 'pixel_values'", None),
    "worker-killed": ("host-oom-killed", "is killed by signal: Killed", None),
    "worker-crashes": ("segfault", "is killed by signal: Segmentation fault", None),
    "damaged-pt": ("checkpoint-corrupt", "[Errno 22] Invalid argument", None),
    "damaged-safetensors": ("checkpoint-corrupt", "SafetensorError", None),
    "other-shapes": ("state-dict-mismatch", "Error(s) in loading state_dict", None),
    "nan": ("user-exception", "returned nan values", None),
    "loss-is-nan": ("loss-nan-abort", "Loss is nan, stopping training", None),
    "different-shapes": ("collective-mismatch", "Detected mismatch between collectives", None),
    "slow-rank": ("nccl-timeout", "Timed out", 0),
    "slow-data": ("nccl-timeout-slow-rank", "failed to pass monitoredBarrier", 0),
    "twice": ("process-group-double-init", "default process group twice", None),
    "no-group": ("process-group-not-initialized", "has not been initialized", None),
    "no-launcher": ("distributed-environment", "RANK expected, but not set", None),
    "own-port": ("port-hardcoded", "EADDRINUSE", None),
    "unused": ("ddp-unused-parameters", "Expected to have finished reduction", None),
    "ready-twice": ("ddp-misuse", "Expected to mark a variable ready only once", None),
    "no-gradients": ("ddp-misuse", "DistributedDataParallel is not needed", None),
    "memory": ("host-out-of-memory", "can't allocate memory", None),
    "memory-python": ("host-out-of-memory", "MemoryError", None),
    "no-cuda": ("cuda-not-available", "Torch not compiled with CUDA enabled", None),
    "nccl-without-gpu": ("cuda-not-available", "", None),
    "hub": ("hub-unavailable", "", None),
    "interrupted": ("interrupted", "", 1),
}
_WITH_FRAMEWORKS: dict[str, tuple[str, str, int | None]] = {
    "label": ("user-exception", "Target 7 is out of bounds", None),
    "one-rank": ("user-exception", "KeyError: 'attention_mask'", 1),
    "sigkill": ("host-oom-killed", "-9", 1),
    "worker-raises": ("user-exception", "could not decode image", None),
    "worker-killed": ("host-oom-killed", "is killed by signal: Killed", None),
    "unused": ("ddp-unused-parameters", "Expected to have finished reduction", None),
    "argument": ("user-exception", "", None),
    "checkpoint": ("user-exception", "", None),
    "memory": ("host-out-of-memory", "can't allocate memory", None),
    "nan": ("user-exception", "returned nan values", None),
    "cuda": ("cuda-not-available", "CUDAAccelerator", None),
    "stage": ("user-args-error", "DeepSpeedZeroConfig", None),
}
# what a framework makes another kind of
_ITS_OWN: dict[str, tuple[str, str, int | None]] = {
    "accelerate-checkpoint": ("user-missing-file", "folder does not exist", None),
    "lightning-checkpoint": ("state-dict-mismatch", "Error(s) in loading state_dict", None),
}
_WAYS = {
    "trainer": "label one-rank sigkill worker-raises argument checkpoint memory",
    "lightning": "label one-rank sigkill worker-raises worker-killed nan cuda checkpoint",
    "accelerate": "one-rank sigkill unused checkpoint",
    "deepspeed": "one-rank sigkill argument checkpoint stage",
}

FAILURES = [
    ProvokedFailure(
        how, *known, TORCH, (how,), ALONE if how in ("no-launcher", "own-port") else TORCHRUN
    )
    for how, known in _WITH_TORCH.items()
] + [
    ProvokedFailure(
        name := f"{framework}-{how}",
        *_ITS_OWN.get(name, _WITH_FRAMEWORKS[how]),
        FRAMEWORKS,
        (framework, how),
    )
    for framework, ways in _WAYS.items()
    for how in ways.split()
]


def lines(path: Path) -> list[tuple[str, str]]:
    """Return the stream ("o" or "e") and the text of each line of a recorded log."""
    rows = path.read_bytes().decode().split("\n")[:-1]
    return [(row[0], row[2:]) for row in rows]
