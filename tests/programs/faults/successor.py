"""For jobs that are replaced: wait until a warm process waits to take their place, then die."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def waits() -> bool:
    """Tell whether a warm process of this run has imported ahead and waits for its task."""
    for process in _warm_processes():
        with contextlib.suppress(OSError):
            # select(2): 23, or pselect6(2): 270, of glibc's choice.
            if (process / "syscall").read_text(encoding="utf-8").split()[0] in ("23", "270"):
                return True
    return False


def await_agent() -> None:
    """Wait until a warm torchrun of this run waits: it has its name once it has imported."""
    _until(lambda: any(_warm_processes()))


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)  # between two looks at all of /proc, which would take a core


def _warm_processes() -> Iterator[Path]:
    mark = b"SAFERUN_TEST_MARK=" + os.environb[b"SAFERUN_TEST_MARK"]
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (process / "comm").read_text(encoding="utf-8") != "saferun-warm\n":
                continue
            if mark in (process / "environ").read_bytes().split(b"\0"):
                yield process


def die(act: Callable[[], object] = bool, *, in_every_attempt: bool = False) -> None:
    """Die of SIGKILL, in attempt 1, one rank of all: under `warm` once a successor waits.

    Args:
        act: called before.
    """
    if os.environ.get("RANK", "0") == "0" and (
        in_every_attempt or os.environ["SAFERUN_ATTEMPT"] == "1"
    ):
        if os.environ["WAY"] == "warm":
            await_agent() if "RANK" in os.environ else _until(waits)
        act()
        os.kill(os.getpid(), signal.SIGKILL)
