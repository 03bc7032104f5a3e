"""Take away the lock of a C++ extension's build whose process is dead.

Target: torch.utils.file_baton.FileBaton.try_acquire, torch >= 2.4; DeepSpeed's extensions use it.
Reason: the lock is a file, which nobody but its owner removes. A rank that is killed while it
builds leaves it, and the ranks of the next attempt wait for it for ever
(https://github.com/pytorch/pytorch/issues/189245).
Delete when the oldest torch here builds under a lock that the kernel frees.

The owner is written into the file. A lock of nobody known, of another machine, of a container apart
or of another user (whose processes `hidepid` hides) is left as it is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import contract, hidden_frames
from ..context import Context

_HOOK = "build_locks"


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Have a lock say whose it is, and be taken from a process that is dead.

    Args:
        name: "torch.utils.file_baton".
        module: that module.
        context: the process's.
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
    """Remove a lock whose owner is dead; one process at a time, so that none removes a new one."""
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
    except OSError:  # its owner removed it, or the file system has no such locks
        return False
    finally:
        os.close(folder)
    return True


def _owner(pid: int) -> str:
    """Return a process as text: where it runs, its pid, its start time ("" where it is dead)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        start = "" if words[0] in (b"Z", b"X") else words[19].decode()
    except OSError:
        start = ""
    return f"{_place()} pid {pid} {start}"


def _place() -> str:
    """Return the boot and the namespaces in which a pid and a start time mean one process."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    paths = ("/proc/self/ns/pid", "/proc/self/ns/time")  # Linux before 5.6 has no second one
    return " ".join(
        ["saferun", boot, *(os.readlink(path) for path in paths if os.path.exists(path))]
    )
