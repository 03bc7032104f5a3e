"""Find, name and read the runs that have left a journal.

This module reads writer.py's files through events.py: facts missing from a broken journal stay
unknown, and nothing fails because of them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from saferun.base import files, untrusted
from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.deciding import retry_policy
from saferun.errors import OWN_FAULT, UnavailableError, UsageError
from saferun.journal import events
from saferun.journal.event_types import AttemptBegun, Recycled, WorkersBegun
from saferun.journal.events import Event
from saferun.journal.run_directory import ALIVE_FILE
from saferun.system import procfs
from saferun.system.procfs import ProcessRecord
from saferun.system.spelling import nearest

OK, FAILED, RUNNING, INTERRUPTED, UNKNOWN = "ok", "failed", "running", "interrupted", "unknown"
FINISHED = (OK, FAILED, INTERRUPTED)
LAST = "last"
DAY_S = 24 * 3600.0
QUIET_S = DAY_S  # a run without a recorded process counts as ended after so long without an event
MARKS = (events.FILE, "plan.json")  # a directory with one of these is a run's


@dataclass(frozen=True, slots=True)
class Run:
    """One run, as far as its journal shows."""

    id: str
    path: str
    outcome: str
    kind: str  # kind of the failure; "" if unknown
    status: int | None  # exit status; None while there is none
    reason: str  # why no further attempt was made
    started_at: float | None  # seconds since the epoch
    took_s: float | None  # up to now if it is running
    last_at: float  # time of its last sign of life, in seconds since the epoch
    attempts: int
    mitigations: tuple[str, ...]  # of the last attempt
    script: str
    script_args: tuple[str, ...]
    process: ProcessRecord  # saferun's process; may be empty
    lost: int  # number of events that the disk did not take


@dataclass(frozen=True, slots=True)
class RecordedPlan:
    """A plan, as far as its record shows."""

    raw: Mapping[str, Any]  # the JSON object; empty if it cannot be read
    profile: str
    launcher: str
    command: tuple[str, ...]
    script: str
    script_args: tuple[str, ...]
    env: Mapping[str, Any]  # values of the variables that it sets
    hooks: Mapping[str, Any]


# --- finding -----------------------------------------------------------------------------------


def find(base: str, now_s: float) -> tuple[list[Run], int]:
    """Return all runs, newest first, and the number of directories that may not be read.

    Args:
        base: the directory of all runs; if it is missing, there are none.
        now_s: seconds since the epoch.

    Raises:
        UnavailableError: the directory cannot be read.
    """
    found, closed = [], 0
    for name in names(base):
        try:
            run = read(base, name, now_s)
        except PermissionError:
            closed += 1
            continue
        found += [run] if run else []
    found.sort(key=lambda run: (run.started_at or run.last_at, run.id), reverse=True)
    return found, closed


def named(base: str, word: str, now_s: float) -> Run:
    """Return the run with this id, the only run whose id begins so, or the newest for `last`.

    Args:
        base: the directory of runs.
        word: the user's choice. It may be the path of a run's directory, which a failed run prints
            last.
        now_s: the present time in Unix seconds.

    Raises:
        UsageError: there is no such run, or more than one.
        UnavailableError: the run cannot be read.
    """
    if os.sep in word:
        base, word = os.path.split(word.rstrip(os.sep))
    if word == LAST:
        runs, _ = find(base, now_s)
        if not runs:
            raise UsageError("there is no run yet", where=base, fix="--run-dir says where to look")
        return runs[0]
    name = _the_one(base, word)
    try:
        run = read(base, name, now_s)
    except PermissionError:
        path = os.path.join(base, name)
        fix = "ask its owner, or look as root"
        raise UnavailableError("this run's journal may not be read", where=path, fix=fix) from None
    if run is None:
        raise UsageError("this directory does not belong to a run", where=os.path.join(base, name))
    return run


def names(base: str) -> list[str]:
    """Return the names that may be runs: directories, but no hidden ones and no links.

    Raises:
        UnavailableError: the directory of runs cannot be read.
    """
    try:
        with os.scandir(base) as entries:
            return [
                entry.name
                for entry in entries
                if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
            ]
    except FileNotFoundError:
        return []
    except OSError as error:
        what = f"the runs cannot be listed: {error.strerror}"
        fix = "fix its mode, or give another one by --run-dir or SAFERUN_RUN_DIR"
        raise UnavailableError(what, where=base, fix=fix) from None


def _the_one(base: str, word: str) -> str:
    found = names(base)
    if word in found:
        return word
    begun = sorted(name for name in found if word and name.startswith(word))
    if len(begun) == 1:
        return begun[0]
    if begun:
        some = ", ".join(begun[-3:]) + (", …" if len(begun) > 3 else "")
        raise UsageError(f"{len(begun)} runs begin with `{word}`", where=base, fix=some)
    raise UsageError(f"no run `{word}`", where=base, fix=_nearest(word, found))


def _nearest(word: str, known: Sequence[str]) -> str:
    close = nearest(word, known, 0.0)
    return f"did you mean `{close}`?" if close else "there is no run yet"


# --- reading -----------------------------------------------------------------------------------


def read(base: str, name: str, now_s: float) -> Run | None:
    """Return a run from its journal; None if the directory is no run's.

    Args:
        base: the directory of runs.
        name: the run's directory in it.
        now_s: the present time in Unix seconds.

    Raises:
        PermissionError: the directory may not be read.
    """
    path = os.path.join(base, name)
    if not is_run(path):
        return None
    log = events.read(path)
    plan = read_plan(path)
    heard = [event.at for event in log if event.at is not None]
    last_at = max(heard, default=_changed_at(path))
    started_at = heard[0] if heard else None
    whole = [event for event in log if event.worker is None]
    begun = _last_begun(whole)
    if (noted := _alive_at(path, begun.by, started_at)) is not None:
        last_at = max(last_at, min(noted, now_s))
    outcome, ended = _outcome(whole, now_s - last_at)
    return Run(
        id=name,
        path=path,
        outcome=outcome,
        kind=_kind(log) if outcome == FAILED else "",
        status=ended.status if ended else None,
        reason=ended.reason if ended else "",
        started_at=started_at,
        took_s=_took_s(outcome, ended, started_at, now_s),
        last_at=last_at,
        attempts=_attempts(log),
        mitigations=begun.mitigations,
        script=plan.script,
        script_args=plan.script_args,
        process=begun.by or {},
        lost=sum(event.lost for event in log),
    )


def _attempts(log: Sequence[Event]) -> int:
    """Return the number of attempts of all workers; a replaced process does not count as one."""
    last: dict[int | None, int] = {}
    for event in log:
        last[event.worker] = max(last.get(event.worker, 0), event.attempt or 0)
    return sum(last.values()) - sum(isinstance(event.facts, Recycled) for event in log)


def is_run(path: str) -> bool:
    """Return whether a directory holds a run's journal.

    Raises:
        PermissionError: the directory may not be read.
    """
    for mark in MARKS:
        try:
            if stat.S_ISREG(os.lstat(os.path.join(path, mark)).st_mode):
                return True
        except PermissionError:
            raise
        except OSError:
            continue
    return False


def read_plan(path: str) -> RecordedPlan:
    """Return the plan of the first attempt of the run in a directory."""
    plan = untrusted.value(files.read(os.path.join(path, "plan.json"), 4 << 20))
    return recorded(untrusted.mapping(plan))


def recorded(raw: Mapping[str, object]) -> RecordedPlan:
    """Return a plan that was written to a journal."""
    env = untrusted.mapping(raw.get("env")).items()
    values = {name: untrusted.mapping(setting).get("value") for name, setting in env}
    return events.record(RecordedPlan, {**raw, "raw": raw, "env": values})


def _outcome(log: Sequence[Event], quiet_s: float) -> tuple[str, Event | None]:
    """Return how a run ended, and the event that shows it."""
    ended, last = _last(log, "end"), _last(log, "ended")
    if ended is None and last is not None and isinstance(last.facts, AttemptOutcome):
        over = last.facts.decision.action in (retry_policy.STOP, retry_policy.DONE)
        ended = last if over else None  # only the event `end` is missing
    if ended is not None:
        if ended.status == 0:
            return OK, ended
        return (INTERRUPTED if ended.asked else FAILED), ended
    by = _last_begun(log).by
    lives = procfs.lives(by) if by else (None if quiet_s < QUIET_S else False)
    return {True: RUNNING, False: INTERRUPTED, None: UNKNOWN}[lives], None


def _failed_for_good(event: Event) -> bool:
    facts = event.facts
    stopped = isinstance(facts, AttemptOutcome) and facts.decision.action == retry_policy.STOP
    return stopped and event.status != 0


def _kind(log: Sequence[Event]) -> str:
    """Return what ended the run: a failure's kind, a fault of our own, or a status."""
    end = _last([event for event in log if event.worker is None], "end")
    last = next((event for event in log if _failed_for_good(event)), _last(log, "ended"))
    if last is not None and isinstance(last.facts, AttemptOutcome) and last.facts.kind:
        return last.facts.kind
    if _last(log, "fault"):
        return OWN_FAULT
    return "" if end is None or end.status is None else f"status {end.status}"


def _took_s(
    outcome: str, ended: Event | None, started_at: float | None, now_s: float
) -> float | None:
    if ended:
        return ended.since_begin_s
    if outcome == RUNNING and started_at is not None:
        return max(0.0, now_s - started_at)
    return None


def _last(log: Sequence[Event], name: str) -> Event | None:
    return next((event for event in reversed(log) if event.name == name), None)


def _last_begun(log: Sequence[Event]) -> AttemptBegun:
    last = _last(log, "attempt") or _last(log, "workers")
    facts = last.facts if last else None
    if isinstance(facts, AttemptBegun):
        return facts
    return AttemptBegun(0, (), facts.by if isinstance(facts, WorkersBegun) else None)


def _alive_at(path: str, by: ProcessRecord | None, started_at: float | None) -> float | None:
    """Return when a run last noted that it lives, in seconds since the epoch; None: unknown.

    The note is in clock ticks since boot, as the start of its process is.
    """
    begun = by.get("start") if by else None
    note = (files.read_private(os.path.join(path, ALIVE_FILE)) or b"").strip()
    if not note.isdigit() or len(note) > 20 or not isinstance(begun, int) or started_at is None:
        return None
    return started_at + max(0, int(note) - begun) / os.sysconf("SC_CLK_TCK")


def _changed_at(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0
