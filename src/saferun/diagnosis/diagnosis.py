"""Pure: the result of a diagnosis. `classify` makes it, and is imported only after a failure."""

from __future__ import annotations

from typing import NamedTuple


class Near(NamedTuple):
    """A kind that nearly fits."""

    kind: str
    line: int  # number in the log; 0 for a line of an error file
    phrase: str  # the sign's phrase; "" if it is not about a sign
    against: str  # why it does not fit, as one clause


class Diagnosis(NamedTuple):
    """What failed, and what to do."""

    kind: str
    group: str = ""
    verdict: str = ""  # retry, mitigate, stop-user, stop-hardware, unknown; "" for no failure
    mitigations: tuple[str, ...] = ()
    root_line: str = ""  # the printed line; "" where there is none
    root_rank: int | None = None
    explanation: str = ""
    advice: str = ""
    references: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()  # Python frames at a crash in native code; innermost first
    decided_by: tuple[str, ...] = ()  # the evidence that decided
    user_frame: str = ""  # innermost frame of the user's code, as `train.py:28  x = y[3]`
    nearest: tuple[Near, ...] = ()  # kinds that an unknown failure is nearest to
    gpu: str = ""  # UUID of the GPU that failed, where NVML tells it
