"""Remove the lock on a C++ extension's build if the process that holds it is dead.

Target: torch.utils.file_baton.FileBaton.try_acquire, torch >= 2.4; DeepSpeed's extensions use it.
Reason: the lock is a file that only its owner removes. A rank that is killed during the build
leaves it, and the ranks of the next attempt wait for it forever
(https://github.com/pytorch/pytorch/issues/189245).
Delete when the oldest supported torch builds under a lock that the kernel frees.

The hook writes the owner into the file. A lock stays if its owner is unknown, on another machine,
in another container, or another user (whose processes `hidepid` hides).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...base import proc
from .. import contract, hidden_frames
from ..context import Context

_HOOK = "build_locks"


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Write the owner into each lock, and take a lock over from a dead process.

    Args:
        name: "torch.utils.file_baton".
        module: that module.
        context: the process's context.
    """

    @hidden_frames.replace(module.FileBaton, "try_acquire")
    def try_acquire(original: Callable[[Any], Any], baton: Any) -> Any:
        taken = original(baton)
        try:
            path = baton.lock_file_path
            if not taken and _removed(path):
                context.receipt(_HOOK, contract.APPLIED, lock=path)
                taken = original(baton)
            if taken:
                with open(path, "w") as file:
                    file.write(_owner(os.getpid()))
        except Exception as error:
            context.failed(_HOOK, error)
        return taken


def _removed(path: str) -> bool:
    """Remove a lock whose owner is dead; one process at a time, so that no new lock is removed."""
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with open(path) as file:
            owner = file.read(200)
        pid = owner.rpartition(" pid ")[2].partition(" ")[0]
        if not pid.isdecimal() or _place() != owner.partition(" pid ")[0]:
            return False
        if os.stat(path).st_uid != os.geteuid():
            return False
        if _owner(int(pid)) == owner:
            return False
        os.unlink(path)
    except OSError:  # its owner removed it, or the file system lacks such locks
        return False
    finally:
        os.close(folder)
    return True


def _owner(pid: int) -> str:
    """Return a process as text: place, pid and start time (all "" if it is dead)."""
    start = proc.start(pid)
    return f"{_place()} pid {pid} {'' if start is None else start}"


def _place() -> str:
    """Return the boot and the namespaces in which a pid and start time identify a process.

    Raises:
        OSError: they cannot be read, so no owner can be compared.
    """
    boot, place = proc.boot(), proc.own_place()
    if not boot or not place:
        raise OSError("/proc does not tell the boot or the namespaces")
    return f"saferun {boot} {place}"
