"""Pure: what is known about a failed attempt, without any conclusion."""

from __future__ import annotations

import json
from typing import NamedTuple

from saferun.diagnosis.reading.log_lines import Log


class RankFailure(NamedTuple):
    """How one rank ended, from sources other than the log."""

    rank: int | None = None
    time_s: float | None = None  # seconds since the epoch
    type: str = ""  # the exception's; "" where the error file does not tell it
    message: str = ""  # the exception's line, from the error file
    traceback: str = ""  # the complete one, from the error file


class NoNumber(NamedTuple):
    """A training's loss that is no number any more."""

    value: str  # "nan", "infinite"
    step: int | None  # the first one with it; None where the job prints none
    good: str  # the last number before it; "" where there was none in this attempt
    good_step: int | None
    good_at_s: float  # seconds since the epoch; what was saved before is older than that number
    epoch: int | None = None  # the training's, at `step`: many count the steps of each one anew


class Hang(NamedTuple):
    """Why a watch has ended an attempt: silence, different first steps, a loss without numbers."""

    kind: str  # "hang", "collective-mismatch", "ranks-differ", "loss-not-finite"
    rank: int | None  # the rank that is elsewhere; None where it is not known
    line: str  # says where it is
    known_from: str = "the watch for silence"
    no_number: NoNumber | None = None


class Observation(NamedTuple):
    """What the machine showed after an attempt; it decides where nothing else tells."""

    source: str  # "kernel's log", "disk", "NVML", "exit status 1"
    text: str  # the line to show
    kind: str = ""  # the failure's; "" where a sign may fit the text
    gpu: str = ""  # UUID of the GPU that it is about


class Evidence(NamedTuple):
    """Everything that is known about a failed attempt."""

    log: Log = Log()
    exit_code: int | None = None  # the whole command's; negative or 128+n for a signal
    failures: tuple[RankFailure, ...] = ()
    age_s: float | None = None  # how long it ran
    step: int | None = None  # the last one that it reached
    oom_kills: int | None = None  # the kernel's count meanwhile; None where it does not tell
    reader_gone: bool = False  # the reader of its stdout or stderr has closed the pipe
    unkillable: int = 0  # processes of it that the kernel could not end
    shm_ample: bool | None = None  # /dev/shm is large and mostly free; None where not known
    disk_ample: bool | None = None  # there is room where a file could not be opened
    hang: Hang | None = None  # the watch has ended it
    keeper: str = ""  # what became of our keeper, where that ended the attempt
    exited: bool = False  # `exit_code` is a script's own, started as plain python; no signal
    finished: bool = False  # the scripts of all its ranks on this node had reached their end


def rank_failure(rank: int | None, content: str | None) -> RankFailure:
    """Read torch elastic's error file of a rank.

    Args:
        rank: the global one.
        content: the file's text; None without a file. Broken JSON leaves the message empty.
    """
    try:
        message = json.loads(content or "")["message"]
    except (ValueError, TypeError, KeyError):
        return RankFailure(rank=rank)
    if not isinstance(message, dict):
        return RankFailure(rank=rank, message=str(message))
    extra = message.get("extraInfo")
    if not isinstance(extra, dict):
        extra = {}
    # What the CUDA context says came before what the rank raised.
    traceback = (extra.get("cuda_context"), extra.get("py_callstack"))
    return RankFailure(
        rank=rank,
        time_s=_number(extra.get("time_s", extra.get("timestamp"))),
        type=str(extra.get("type", "")),
        message=str(message.get("message", "")),
        traceback="\n".join(str(text) for text in traceback if text),
    )


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None
