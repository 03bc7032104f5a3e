"""Keep frames of ours out of the tracebacks that users see."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def hide(error: BaseException) -> None:
    """Take our frames off the outer end of an exception's traceback, which so far ends here.

    For an `except BaseException as error:` that ends with a plain `raise`, which adds no new entry.
    Python 3.9 and 3.10 put the entry back; there `hide_all` takes it off what ends the process.
    """
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    error.__traceback__ = trace


def hidden(
    function: "Callable[..., Any]", take_off: "Callable[[BaseException], None]" = hide
) -> "Callable[..., Any]":
    """Return a wrapper whose frame and `function`'s own are in no traceback.

    Args:
        function: a hook's, which stands in the place of a library's.
        take_off: `hide_all` where the library calls other functions of ours in turn.
    """
    import functools

    @functools.wraps(function)
    def wrapper(*args: "Any", **kwargs: "Any") -> "Any":
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            take_off(error)
            raise

    return wrapper


def followed(function: "Callable[..., Any]", step: "Callable[..., object]") -> "Callable[..., Any]":
    """Return a wrapper that calls `step(frame, *args, **kwargs)` after each call that returns.

    `frame` is the caller's. The traceback of an exception has no frame of ours; `step` raises none.
    """
    import functools
    import sys

    @functools.wraps(function)
    def wrapper(*args: "Any", **kwargs: "Any") -> "Any":
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            hide(error)
            raise
        step(sys._getframe(1), *args, **kwargs)
        return result

    return wrapper


def hide_all(error: BaseException) -> None:
    """Take all frames of ours off an exception's traceback and those of what led to it."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = without_ours(one.__traceback__)
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def without_ours(trace: "TracebackType | None") -> "TracebackType | None":
    """Unlink the entries of our files from a traceback, and return its first entry then."""
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    entry = trace
    while entry is not None and entry.tb_next is not None:
        if _is_ours(entry.tb_next):
            entry.tb_next = entry.tb_next.tb_next
        else:
            entry = entry.tb_next
    return trace


def _is_ours(entry: "TracebackType") -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OURS)
