"""Pure: the answer of a diagnosis. `classify` finds it, and is loaded after a failure alone."""

from __future__ import annotations

from typing import NamedTuple


class Near(NamedTuple):
    """A kind that does not fit."""

    kind: str
    line: int  # number in the log; 0 where it stands in an error file
    phrase: str  # its sign's; "" where no sign is meant
    against: str  # one clause


class Diagnosis(NamedTuple):
    """What failed and what to do."""

    kind: str
    group: str = ""
    verdict: str = ""  # retry, mitigate, stop-user, stop-hardware, unknown; "" for no failure
    mitigations: tuple[str, ...] = ()
    root_line: str = ""  # the printed line; "" where there is none
    root_rank: int | None = None
    explanation: str = ""
    advice: str = ""
    references: tuple[str, ...] = ()
    stack: tuple[str, ...] = ()  # Python frames where it crashed in native code; innermost first
    decided_by: tuple[str, ...] = ()  # the evidence that decided
    user_frame: str = ""  # the innermost frame of the user's code, as `train.py:28  x = y[3]`
    nearest: tuple[Near, ...] = ()  # kinds that an unknown failure nearly has
    gpu: str = ""  # UUID of the GPU that failed, where NVML tells it
