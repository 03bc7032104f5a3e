"""The two signals that glibc keeps for itself, 32 and 33 (nptl/pthreadP.h).

`posix_spawn`, by which a keeper starts, lets its program ignore them
(sysdeps/unix/sysv/linux/spawni.c), and every process below would inherit that. Only the kernel's
call changes it: sigaction(3) refuses both. This module uses only the standard library.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

NUMBERS = (32, 33)
_IGNORE = 1  # SIG_IGN
_SET_BYTES = 8  # the kernel's sigset_t
# __NR_rt_sigaction, in the kernel's asm/unistd.h; elsewhere the two stay ignored.
_CALLS = {"x86_64": 13, "aarch64": 134, "riscv64": 134, "ppc64le": 173, "s390x": 174}


def ignored() -> list[int]:
    """Return which of the two this process ignores."""
    found = []
    for number in NUMBERS:
        action = (ctypes.c_void_p * 8)()  # the handler comes first; larger than any kernel's struct
        if _call(number, None, action) and action[0] == _IGNORE:
            found.append(number)
    return found


def restore(numbers: Sequence[int]) -> None:
    """Let this process ignore those of the two that are among `numbers`, and not the others."""
    for number in NUMBERS:
        action = (ctypes.c_void_p * 8)(_IGNORE if number in numbers else None)
        _call(number, action, None)


def _call(number: int, new: object, old: object) -> bool:
    call = _CALLS.get(os.uname().machine)
    libc = ctypes.CDLL(None)
    return call is not None and libc.syscall(call, number, new, old, _SET_BYTES) == 0
