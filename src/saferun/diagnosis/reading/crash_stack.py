"""Pure: the Python stack that faulthandler writes when a process crashes in native code."""

from __future__ import annotations

import re
from collections.abc import Iterable

from saferun.diagnosis.reading.log_lines import Line

MOST = 5  # most frames that are kept, from the innermost one
_FATAL = re.compile(r"Fatal Python error: |Windows fatal exception: ")
_THREAD = re.compile(
    r"(?P<current>Current )?[Tt]hread 0x[0-9a-f]+ .{0,80}\(most recent call first\):"
)
_FRAME = re.compile(r'  File "[^"]{1,400}", line \d{1,9} in \S{1,200}')


def crash_stack(lines: Iterable[Line], rank: int | None) -> tuple[str, ...]:
    """Return the innermost frames of the thread that crashed first, the innermost one first.

    Args:
        lines: the log's lines.
        rank: the rank whose crash is wanted, if prefixes name ranks; None: the first crash.

    Returns:
        Lines such as `File "train.py", line 9 in step`. Frames of an import are left out, except
        for the two innermost. The result is empty if the log has no such stack.
    """
    found: list[str] = []
    crashed = inside = False
    for line in lines:
        if rank is not None and line.rank not in (None, rank):
            continue
        if "atal" in line.text and _FATAL.search(line.text):
            crashed = True
        elif crashed and (thread := _THREAD.search(line.text)):
            if found:
                break
            inside = bool(thread["current"])
        elif inside and (frame := _FRAME.search(line.raw)):
            found.append(frame[0].strip())
        elif inside and found:
            break
    shown = [*found[:2], *(frame for frame in found[2:] if "<frozen importlib." not in frame)]
    return tuple(shown[:MOST])
