"""Keep frames of ours out of the tracebacks that users see."""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep


def hide_this_frame(error: BaseException) -> None:
    """Take the caller's frame, which is the outermost so far, off an exception's traceback.

    For an `except BaseException as error:` that ends with a plain `raise`, which adds no new entry.
    Python 3.9 and 3.10 put the entry back; there `hide_ours` takes it off what ends the process.
    """
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next


def hide_ours(error: BaseException) -> None:
    """Take all frames of ours off an exception's traceback and those of what led to it.

    A traceback that consists of such frames alone is left as it is: it is of an error of ours.
    """
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
    """Unlink the entries of our files from a traceback, except where one is the last.

    Args:
        trace: it is changed in place.

    Returns:
        Its first entry now.
    """
    while trace is not None and _is_ours(trace) and trace.tb_next is not None:
        trace = trace.tb_next
    entry = trace
    while entry is not None and entry.tb_next is not None:
        following = entry.tb_next
        if _is_ours(following) and following.tb_next is not None:
            entry.tb_next = following.tb_next
        else:
            entry = following
    return trace


def _is_ours(entry: "TracebackType") -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(_OURS)
