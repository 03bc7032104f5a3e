"""How the time of a run was spent: useful work, repeated work, starts and waits.

Repeated work is what a failure cost, whether or not a later attempt has done it again; where none
has, it is lost. The three
parts of an attempt add up to the time since the end of the previous one; those of a run to the
run's duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from saferun.base import files
from saferun.journal import training_steps, trials
from saferun.journal.attempts import RecordedAttempt, directory
from saferun.journal.reader import INTERRUPTED, OK, RUNNING, Run
from saferun.journal.training_steps import Point, Steps
from saferun.journal.trials import Trial

_NOTHING_SAVED, _NOTHING_KNOWN = "nothing was saved", "all of it: no checkpoint is known"
UNSAVED = (_NOTHING_SAVED, _NOTHING_KNOWN)  # values of `why` for which all work is repeated


@dataclass(frozen=True, slots=True)
class Spent:
    """The parts of a time, in seconds."""

    useful_s: float = 0.0
    done_again_s: float = 0.0
    starts_and_waits_s: float = 0.0
    waited_s: float = 0.0  # the part of these before the attempt
    why: str = ""  # how the repeated work is known
    lost_s: float = 0.0  # the part of the repeated work that no attempt has repeated


@dataclass(frozen=True, slots=True)
class Times:
    """The parts of a run's time."""

    took_s: float  # duration of the run so far
    whole: Spent
    attempts: tuple[Spent, ...]  # each with the wait before it


def read(run: Run, every: Sequence[RecordedAttempt], now_s: float) -> Times:
    """Return the parts of a run's time.

    Args:
        run: the run.
        every: all its attempts, including replaced processes; those of each worker stand together.
        now_s: seconds since the epoch.
    """
    took_s = run.took_s
    if took_s is None:
        took_s = max(0.0, run.last_at - (run.started_at or run.last_at))
    parts = _of_attempts(run, every, trials.read(run.path), now_s)
    workers = len({one.worker for one in every}) or 1  # the workers share the run's time
    useful_s = min(took_s, sum(part.useful_s for part in parts) / workers)
    again_s = min(took_s - useful_s, sum(part.done_again_s for part in parts) / workers)
    lost_s = min(again_s, sum(part.lost_s for part in parts) / workers)
    rest_s = took_s - useful_s - again_s
    return Times(took_s, Spent(useful_s, again_s, rest_s, lost_s=lost_s), parts)


def _of_attempts(
    run: Run, every: Sequence[RecordedAttempt], finished: Sequence[Trial], now_s: float
) -> tuple[Spent, ...]:
    found = []
    ranks_meet = any(one.ready_at is not None for one in every)
    for at, one in enumerate(every):
        before, after = _neighbour(every, at, -1), _neighbour(every, at, 1)
        since = run.started_at if before is None else _end(run, before, one, now_s)
        begun = one.started_at
        if begun is None or since is None:
            found.append(Spent())
            continue
        end = max(begun, _end(run, one, after, now_s))
        mine = [trial for trial in finished if _is_of(trial, one, begun, end)]
        ready = min(end, max(begun, _ready_at(one, mine)))
        if ranks_meet and not _has_worked(one, mine):
            ready = end
        kept_at = max([ready, *(trial.at for trial in mine)]) if finished else None
        again_s, why = _done_again(run, one, after, ready, end, kept_at)
        again_s, waited_s = min(again_s, end - ready), max(0.0, begun - since)
        lost = one.outcome.lost_work
        idle_s = min(lost.idle_s, end - ready - again_s) if lost else 0.0
        useful_s = end - ready - again_s - idle_s
        lost_s = again_s if after is None and run.outcome != RUNNING else 0.0
        starts_s = waited_s + ready - begun + idle_s
        found.append(Spent(useful_s, again_s, starts_s, waited_s, why, lost_s))
    return tuple(found)


def _neighbour(every: Sequence[RecordedAttempt], at: int, step: int) -> RecordedAttempt | None:
    """Return the same worker's attempt before or after one."""
    there = at + step
    found = every[there] if 0 <= there < len(every) else None
    return found if found and found.worker == every[at].worker else None


def _end(run: Run, one: RecordedAttempt, after: RecordedAttempt | None, now_s: float) -> float:
    """Return when an attempt ended, or the last time at which it is known to have run."""
    if one.outcome.has_ended:
        return (one.started_at or 0.0) + one.outcome.lived_s
    if after is not None and after.started_at is not None:
        return after.started_at
    return now_s if run.outcome == RUNNING else run.last_at


def _is_of(trial: Trial, one: RecordedAttempt, begun: float, end: float) -> bool:
    """Return whether a trial began and ended in an attempt."""
    mine = trials.ran_in(trial, one.number, one.worker)
    return mine and begun <= trial.at - (trial.seconds or 0.0) and trial.at <= end


def _ready_at(one: RecordedAttempt, trials: Sequence[Trial]) -> float:
    """Return when the work of an attempt began; its start if that is unknown."""
    if trials:
        return min(trial.at - (trial.seconds or 0.0) for trial in trials)
    return one.ready_at or one.started_at or 0.0


def _has_worked(one: RecordedAttempt, trials: Sequence[Trial]) -> bool:
    """Return whether an attempt, in a run whose ranks meet, did any work."""
    runs = not one.outcome.has_ended or one.outcome.exit_code == 0
    return bool(trials) or runs or (one.ready_at, one.outcome.first_step) != (None, None)


def _done_again(
    run: Run,
    one: RecordedAttempt,
    after: RecordedAttempt | None,
    ready: float,
    end: float,
    kept_at: float | None,
) -> tuple[float, str]:
    """Return the seconds of an attempt's work that are repeated, and how that is known.

    Args:
        run: the run.
        one: the attempt.
        after: the next one.
        ready: when its work began.
        end: when it ended.
        kept_at: until when the study has its trials; None if there is no search.
    """
    ended, lost = one.outcome.has_ended, one.outcome.lost_work
    goes_on = after is None and not ended and run.outcome == RUNNING
    ended_well = one.outcome.exit_code == 0 or (after is None and not ended and run.outcome == OK)
    if ended_well or one.replaced or goes_on:
        return 0.0, ""
    if kept_at is not None:
        return end - kept_at, "since its last finished trial"
    if lost is not None:
        steps = f"{lost.steps} steps, " if lost.steps else ""
        saved = f"since {lost.checkpoint}" if lost.checkpoint else _NOTHING_SAVED
        return lost.s, steps + saved if lost.checkpoint else saved
    if after is None and ended and run.outcome == INTERRUPTED:
        return 0.0, ""  # the user who ended it may have the wanted result
    resumed = steps_of(run, after, 0.0, 0.0).began if after else None
    if resumed:
        begun = one.started_at or 0.0
        made = steps_of(run, one, ready - begun, end - begun)
        came_s = training_steps.reached_s(made, resumed)
        if came_s is not None:
            again_s = max(0.0, end - begun - came_s)
            return again_s, f"about; the next attempt went on from step {resumed}"
    return end - ready, _NOTHING_KNOWN


def steps_of(run: Run, one: RecordedAttempt, ready_s: float, end_s: float) -> Steps:
    """Return the steps of an attempt, as far as its files show.

    Args:
        run: the run.
        one: the attempt.
        ready_s: when its work began, in seconds since its start.
        end_s: when it ended, or the last time at which it is known to have run.
    """
    noted = training_steps.read(directory(run, one), one.number)
    tails = [files.read(path, 1 << 20) for path, _ in one.tails]
    saved = [Point(found.s, found.step) for found in one.outcome.saved if found.step is not None]
    return training_steps.steps(noted, tails, one.outcome.first_step, ready_s, end_s, saved)
