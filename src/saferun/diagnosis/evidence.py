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
    traceback: str = ""  # complete, from the error file
    bases: tuple[str, ...] = ()  # the classes that the exception's own derives from


class NoNumber(NamedTuple):
    """A training loss that is not a number any more."""

    value: str  # "nan", "infinite"
    step: int | None  # the first step with it; None if the job prints none
    good: str  # the last number before it; "" if this attempt printed none
    good_step: int | None
    good_at_s: float  # seconds since the epoch; earlier checkpoints are older than that number
    epoch: int | None = None  # epoch at `step`: many trainings count steps per epoch


class Hang(NamedTuple):
    """Why a watch ended an attempt: silence, different first steps, a loss that is not a number."""

    kind: str  # "hang", "collective-mismatch", "ranks-differ", "loss-not-finite", "hooks-missing"
    rank: int | None  # the rank that is elsewhere; None if unknown
    line: str  # where that rank is
    known_from: str = "the watch for silence"
    no_number: NoNumber | None = None


class Observation(NamedTuple):
    """What the machine shows after an attempt; it decides if nothing else does."""

    source: str  # "kernel's log", "disk", "NVML", "exit status 1"
    text: str  # the line to show
    kind: str = ""  # kind of the failure; "" if the signs may determine it
    gpu: str = ""  # UUID of the GPU that it is about


class Evidence(NamedTuple):
    """Everything that is known about a failed attempt."""

    log: Log = Log()
    stderr_from: int | None = None  # number of the log's first line of stderr; None: not apart
    exit_code: int | None = None  # of the whole command; negative or 128+n for a signal
    failures: tuple[RankFailure, ...] = ()
    age_s: float | None = None  # how long it ran
    step: int | None = None  # the last step that it reached
    oom_kills: int | None = None  # the kernel's count during the attempt; None if unknown
    reader_gone: bool = False  # the reader of its stdout or stderr has closed the pipe
    unkillable: int = 0  # number of its processes that the kernel could not end
    shm_ample: bool | None = None  # /dev/shm is large and mostly free; None if unknown
    disk_ample: bool | None = None  # a file could not be opened although the disk has room
    hang: Hang | None = None  # set if the watch ended the attempt
    stall: Hang | None = None  # the rank that others waited for when it ended
    keeper: str = ""  # what happened to our keeper, if that ended the attempt
    named: str = ""  # the kind of its failure, as its process says; "" if it does not
    exited: bool = False  # `exit_code` is that of a script started as plain python, not a signal
    finished: bool = False  # the scripts of all its ranks on this node ran to their end


def rank_failure(rank: int | None, content: str | None) -> RankFailure:
    """Read a rank's error file, which torch elastic writes.

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
    # The CUDA context's message describes an earlier event than the rank's exception.
    traceback = (extra.get("cuda_context"), extra.get("py_callstack"))
    return RankFailure(
        rank=rank,
        time_s=_number(extra.get("time_s", extra.get("timestamp"))),
        type=str(extra.get("type", "")),
        bases=tuple(map(str, extra.get("bases") or ())),
        message=str(message.get("message", "")),
        traceback="\n".join(str(text) for text in traceback if text),
    )


def _number(value: object) -> float | None:
    try:
        return float(str(value))
    except ValueError:
        return None
