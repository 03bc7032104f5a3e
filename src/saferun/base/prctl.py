"""What a process asks of the kernel for itself (prctl(2)). A refusal is ignored."""

import os

_SET_PDEATHSIG, _SET_NAME, _SET_CHILD_SUBREAPER = 1, 15, 36  # linux/prctl.h
_SIGKILL = 9  # the import of signal costs 2 ms
try:  # the base of ctypes, at a quarter of its cost; a forked child finds it loaded
    import _ctypes

    _PRCTL = _ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "prctl")  # type: ignore[arg-type]  # None is this process
    _call = _ctypes.call_function
except Exception:  # a Python with another base, or none
    _call = None  # type: ignore[assignment]  # a function as a rule


def die_with_parent() -> None:
    """Have the kernel end this process by SIGKILL when the thread that started it ends."""
    _ask(_SET_PDEATHSIG, _SIGKILL)


def become_subreaper(*, on: bool = True) -> None:
    """Let orphans among our descendants become our children, or no longer."""
    _ask(_SET_CHILD_SUBREAPER, int(on))


def set_name(name: bytes) -> None:
    """Set the name of this process that ps and top show, at most 15 bytes."""
    _ask(_SET_NAME, name)


def _ask(option: int, value: "int | bytes") -> None:
    try:
        if _call is not None:
            _call(_PRCTL, (option, value, 0, 0, 0))
        else:
            import ctypes  # only where its base is missing

            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
    except Exception:  # what it would do is for the worst case alone
        pass
