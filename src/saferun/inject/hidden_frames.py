"""Replace a library's functions by ours, and keep our frames out of tracebacks."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
    from typing import Any

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def hide(error: BaseException) -> None:
    """Remove our frames from the outer end of an exception's traceback, which so far ends here.

    It is for an `except BaseException as error:` that ends with a plain `raise`, which adds no new
    entry. Python 3.9 and 3.10 put the entry back; there `hide_all` removes it from the exception
    that ends the process.
    """
    trace = error.__traceback__
    while trace is not None and _is_ours(trace):
        trace = trace.tb_next
    error.__traceback__ = trace


def wrapped(
    original: "Callable[..., Any]",
    ours: "Callable[..., Any]",
    take_off: "Callable[[BaseException], None]" = hide,
) -> "Callable[..., Any]":
    """Return a function that calls `ours(original, *args, **kwargs)` and looks like `original`.

    The traceback of an exception has none of our frames.

    Args:
        original: a library's function.
        ours: our function that replaces it.
        take_off: `hide_all` if the library calls more of our functions in turn.
    """
    import functools

    @functools.wraps(original)
    def wrapper(*args: "Any", **kwargs: "Any") -> "Any":
        try:
            return ours(original, *args, **kwargs)
        except BaseException as error:
            take_off(error)
            raise

    return wrapper


def replace(
    holder: "Any", name: str, take_off: "Callable[[BaseException], None]" = hide
) -> "Callable[[Callable[..., Any]], Callable[..., Any]]":
    """Return a decorator that replaces a library's function by ours.

    Our function gets the library's function as its first argument; see `wrapped`.

    Args:
        holder: the module or the class that has the library's function.
        name: the function's name there.
        take_off: as for `wrapped`.
    """

    def put(ours: "Callable[..., Any]") -> "Callable[..., Any]":
        wrapper = wrapped(getattr(holder, name), ours, take_off)
        setattr(holder, name, wrapper)
        return wrapper

    return put


def follow(holder: "Any", name: str, act: "Callable[[Any, FrameType], object]") -> None:
    """Call `act` with the object and the caller's frame after each call of a class's method.

    Args:
        holder: the class.
        name: the method's name.
        act: function to call, which never raises.
    """

    @replace(holder, name)
    def following(
        original: "Callable[..., Any]", self: "Any", /, *args: "Any", **kwargs: "Any"
    ) -> "Any":
        result = original(self, *args, **kwargs)
        act(self, caller())
        return result


def caller() -> "FrameType":
    """Return the frame that called the replaced function; our replacement calls this."""
    return sys._getframe(3)


def hide_all(error: BaseException) -> None:
    """Remove all our frames from the tracebacks of an exception and of its causes."""
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
    """Unlink the entries of our files from a traceback, and return the new first entry."""
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
