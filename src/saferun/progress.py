"""Pure: from which step on an attempt trained, as its output tells.

A resumed attempt is known by its first step: it lies beyond those of the attempts before it. A
number only counts as a step where a second, larger one follows in a line of the same form:
"max_steps=20000" is no progress. Loading, tokenizing and evaluating count from zero, so the largest
first number of all such series is the training's.
"""

from __future__ import annotations

import re

HEAD_BYTES = 64 * 1024  # of an attempt's output that is looked at
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
    started: dict[bytes, int] = {}
    found: list[int] = []
    for line in re.split(rb"[\r\n]+", head[:HEAD_BYTES]):
        match = _STEP.search(line[:_LINE_BYTES])
        if match is None:
            continue
        number = int(match[1] or match[2])
        form = _NUMBERS.sub(b"#", line[: match.start(match.lastindex or 1)][-200:])
        if form not in started:
            started[form] = number
        elif number > started[form]:
            found.append(started[form])
    return max(found, default=None)
