"""Pure: the work that a failure costs, and how often a job should save.

Work is lost between the last complete checkpoint and the failure. The best interval between
checkpoints follows from the time to write one and the rate of failures (Young 1974, Daly 2006:
https://doi.org/10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from saferun.model import Checkpoint

ENOUGH = 3  # failures; an interval from fewer would be a guess
_NAMED = 200  # most checkpoints of one attempt
_SEEN_S = 10.0  # the watch sees to within so much when a silence began
_WORTH = 1.5  # the factor by which the present interval must differ to be reported


class WorkLost(NamedTuple):
    """The work of one failed attempt that must be repeated."""

    s: float
    steps: int | None  # None if the steps or the checkpoint's number are unknown
    gpu_hours: float
    checkpoint: str  # the newest complete one; "" if there is none
    idle_s: float = 0.0  # since then all ranks waited for so long, for what did not come


class Saved(NamedTuple):
    """A checkpoint that an attempt has written."""

    s: float  # seconds since the start of the attempt
    step: int | None  # None if its name has none, or counts epochs


def saved_in(began_at: float, lived_s: float, found: Sequence[Checkpoint]) -> tuple[Saved, ...]:
    """Return the checkpoints on disk that an attempt has written, the oldest first.

    Args:
        began_at: start of the attempt, in seconds since the epoch.
        lived_s: seconds from then to its end.
        found: the checkpoints on disk, the newest first.
    """
    ours = [one for one in found if 0 <= one.at_s - began_at <= lived_s][:_NAMED]
    return tuple(Saved(round(one.at_s - began_at, 1), _step(one)) for one in reversed(ours))


def lost(
    last_step: int | None,
    began_at: float,
    worked_s: float,
    checkpoint: Checkpoint | None,
    gpus: int,
    idle: Sequence[tuple[float, float]] = (),
) -> WorkLost:
    """Return the work that an attempt has lost. Time in which its ranks only waited is none.

    Args:
        last_step: the last step in its output; None without one.
        began_at: when its work began, after its start-up, in seconds since the epoch.
        worked_s: seconds from then to its end.
        checkpoint: the run's newest complete checkpoint; None if there is none.
        gpus: number of this machine's GPUs that it used.
        idle: when all ranks only waited, from and until, in seconds since the epoch.
    """
    since = worked_s
    if checkpoint is not None:  # a file server's clock may differ from ours
        since = min(worked_s, max(0.0, began_at + worked_s - checkpoint.at_s))
    saved = 0 if checkpoint is None else _step(checkpoint)
    steps = None
    if last_step is not None and saved is not None and saved <= last_step:
        steps = last_step - saved
    end = began_at + worked_s
    idle_s = sum(max(0.0, min(until, end) - max(at, end - since)) for at, until in idle)
    since -= idle_s
    if idle_s and steps == 0 and since <= _SEEN_S:
        since = 0.0
    path = checkpoint.path if checkpoint else ""
    hours = round(since * gpus / 3600, 4)
    return WorkLost(round(since, 1), steps, hours, path, round(idle_s, 1))


def _step(checkpoint: Checkpoint) -> int | None:
    """Return the step in a checkpoint's name; None if the number there counts epochs."""
    name = checkpoint.path.rpartition("/")[2]
    epochs = re.search("epoch", name) and not re.search("step|iter", name)
    return None if epochs or checkpoint.step < 0 else checkpoint.step


def interval_s(write_s: float, between_failures_s: float) -> float:
    """Return the time between checkpoints that loses least, by Daly's higher-order estimate.

    Args:
        write_s: time to write a checkpoint, in seconds.
        between_failures_s: mean time between failures, in seconds.

    >>> round(interval_s(10.0, 7200.0)), round(interval_s(100.0, 50.0))
    (372, 50)
    """
    if write_s >= 2 * between_failures_s:
        return between_failures_s
    ratio = write_s / (2 * between_failures_s)
    best = math.sqrt(2 * write_s * between_failures_s)
    return best * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def better_interval_s(
    lived_s: Sequence[float], write_s: Sequence[float], saved_at: Sequence[float]
) -> float | None:
    """Return the interval at which the job should save; None if unknown or near the present one.

    Args:
        lived_s: how long each failed attempt lived, in seconds.
        write_s: how long it took to write some of the checkpoints, in seconds.
        saved_at: when each checkpoint was written, in seconds since the epoch.
    """
    times = sorted(saved_at)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if len(lived_s) < ENOUGH or not write_s or not gaps or min(write_s) <= 0:
        return None
    best = interval_s(_median(write_s), sum(lived_s) / len(lived_s))
    now = _median(gaps)
    return best if now > best * _WORTH or best > now * _WORTH else None


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
