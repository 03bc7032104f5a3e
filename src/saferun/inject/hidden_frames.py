"""Put functions of ours in the place of a library's, and keep their frames out of tracebacks."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, TracebackType
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


def wrapped(
    original: "Callable[..., Any]",
    ours: "Callable[..., Any]",
    take_off: "Callable[[BaseException], None]" = hide,
) -> "Callable[..., Any]":
    """Return a function that calls `ours(original, *args, **kwargs)` and looks like `original`.

    The traceback of an exception has no frame of ours.

    Args:
        original: a library's function.
        ours: what stands in its place.
        take_off: `hide_all` where the library calls other functions of ours in turn.
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
    """Return a decorator that puts a function of ours in the place of a library's.

    The function gets the library's own as its first argument; see `wrapped`.

    Args:
        holder: the module or the class that has the library's function.
        name: its name there.
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
        name: of the method.
        act: never raises.
    """

    @replace(holder, name)
    def following(
        original: "Callable[..., Any]", self: "Any", /, *args: "Any", **kwargs: "Any"
    ) -> "Any":
        result = original(self, *args, **kwargs)
        act(self, caller())
        return result


def caller() -> "FrameType":
    """Return the frame that called the function in whose place the caller of this one stands."""
    return sys._getframe(3)


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
