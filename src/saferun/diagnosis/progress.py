"""Pure: from which step on an attempt trained, and how far it came, as its output tells.

A resumed attempt is known by its first step: it lies beyond those of the attempts before it. A
number only counts as a step where a second, larger one follows in a line of the same form:
"max_steps=20000" is no progress. Loading, tokenizing and evaluating count from zero, so the largest
first number of all such series is the training's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

HEAD_BYTES = 64 * 1024  # of an attempt's output that is looked at, at either end
_STEP = re.compile(
    rb"\b(?:global[_ ]?step|steps?|iter(?:ation)?s?|batch)\b[ =:#/\[\]\"']{1,4}(\d{1,9})\b"
    rb"|(?<![\d.])(\d{1,9})/\d{1,9} ?\[",  # tqdm's bar
    re.IGNORECASE,
)
_NUMBERS = re.compile(rb"\d+")
_LINE_BYTES = 2000


def first_step(head: bytes) -> int | None:
    """Return the first training step in the beginning of an attempt's output; None if none is seen.

    >>> first_step(b"step 11 loss 3.2\\nstep 12 loss 3.1\\n")
    11
    >>> first_step(b"max_steps=20000 and nothing else")
    """
    return max((first for first, _ in _series(head[:HEAD_BYTES])), default=None)


def last_step(tail: bytes) -> int | None:
    """Return the last training step in the end of an attempt's output; None if none is seen.

    >>> last_step(b"step 11 loss 3.2\\nstep 12 loss 3.1\\n")
    12
    """
    return max((last for _, last in _series(tail[-HEAD_BYTES:])), default=None)


def _series(output: bytes) -> Iterator[tuple[int, int]]:
    """Return the first and the largest number of what counts upwards."""
    ends: dict[bytes, tuple[int, int]] = {}
    for line in re.split(rb"[\r\n]+", output):
        match = _STEP.search(line[:_LINE_BYTES])
        if match is None:
            continue
        number = int(match[1] or match[2])
        form = _NUMBERS.sub(b"#", line[: match.start(match.lastindex or 1)][-200:])
        first, last = ends.get(form, (number, number))
        ends[form] = (first, max(last, number))
    return (pair for pair in ends.values() if pair[1] > pair[0])
