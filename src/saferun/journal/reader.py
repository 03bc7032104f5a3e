"""What runs left behind: find them and read them.

Reads what writer.py writes. A journal may be cut, garbage, half of a full disk's, another user's
or still being written: what it does not tell stays unknown, and nothing here fails for it.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.diagnosis import retry_policy
from saferun.errors import UnavailableError, UsageError
from saferun.inject import contract
from saferun.journal.writer import read_events
from saferun.system import paths, procfs

OK, FAILED, RUNNING, INTERRUPTED, UNKNOWN = "ok", "failed", "running", "interrupted", "unknown"
FINISHED = (OK, FAILED, INTERRUPTED)
LAST = "last"
DAY_S = 24 * 3600.0
QUIET_S = DAY_S  # a run that left no word of its process is over when it wrote nothing for so long
MARKS = ("events.jsonl", "plan.json")  # a directory with one of them is a run's
_MAX_PLAN = 4 << 20  # bytes
_MAX_AT = 253_402_214_400.0  # the year 9999: later ones cannot be shown


class Run(NamedTuple):
    """One run, as far as its journal tells."""

    id: str
    path: str
    outcome: str
    kind: str  # of the failure; "" where none is known
    status: int | None  # exit status; None while there is none
    reason: str  # why it was not tried again
    started_at: float | None  # seconds since the epoch
    took_s: float | None  # until now where it runs
    last_at: float  # seconds since the epoch; when it was last heard of
    attempts: int
    mitigations: tuple[str, ...]  # of the last attempt
    script: str
    script_args: tuple[str, ...]
    process: Mapping[str, Any]  # of saferun: pid, host; may be empty
    lost: int  # events that the disk did not take


class Attempt(NamedTuple):
    """One attempt of a run, as far as its journal tells."""

    number: int
    started_at: float | None  # seconds since the epoch
    lived_s: float | None
    status: int | None
    ended_by: str  # "job", "grace", "interrupt", "keeper"
    kind: str
    rank: int | None  # that failed first
    line: str  # that decided, without its particulars where the journal has no other
    mitigations: tuple[str, ...]
    changed: tuple[str, ...]  # against the attempt before it
    action: str  # what was decided: "again", "stop", "done"
    reason: str
    delay_s: float
    signals: tuple[str, ...]  # that were passed on to it
    killed: int  # processes that had to be killed
    unkillable: tuple[int, ...]  # pids
    tails: tuple[tuple[str, int], ...]  # (path, bytes)
    hooks: tuple[str, ...]  # what is to be said of the hooks in it


# --- finding -----------------------------------------------------------------------------------


def directory(run_dir: str | None, environ: Mapping[str, str], cwd: str) -> str:
    """Return where runs keep their journals, as a launch with the same words has it."""
    given = run_dir or environ.get("SAFERUN_RUN_DIR")
    return os.path.join(cwd, given or os.path.join(paths.state_dir(environ), "runs"))


def find(base: str, now_s: float) -> tuple[list[Run], int]:
    """Return all runs, newest first, and how many directories may not be read.

    Args:
        base: the directory of all runs; where it is missing there are none.
        now_s: seconds since the epoch.

    Raises:
        UnavailableError: it cannot be read.
    """
    found, closed = [], 0
    for name in _names(base):
        try:
            run = read(base, name, now_s)
        except PermissionError:
            closed += 1
            continue
        found += [run] if run else []
    found.sort(key=lambda run: (run.started_at or run.last_at, run.id), reverse=True)
    return found, closed


def named(base: str, word: str, now_s: float) -> Run:
    """Return the run with this id, or whose id alone begins so, or the newest for `last`.

    A path leads to the run's own directory: such is what a failed run says last.

    Raises:
        UsageError: there is none, or more than one.
        UnavailableError: it cannot be read.
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
        raise UsageError("this directory is no run's", where=os.path.join(base, name))
    return run


def _names(base: str) -> list[str]:
    """Return what may be a run: directories, not hidden, not by a link."""
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
    names = _names(base)
    if word in names:
        return word
    begun = sorted(name for name in names if word and name.startswith(word))
    if len(begun) == 1:
        return begun[0]
    if begun:
        some = ", ".join(begun[-3:]) + (", …" if len(begun) > 3 else "")
        raise UsageError(f"{len(begun)} runs begin with `{word}`", where=base, fix=some)
    raise UsageError(f"no run `{word}`", where=base, fix=_nearest(word, names))


def _nearest(word: str, names: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, names, n=1, cutoff=0.0)
    return f"did you mean `{close[0]}`?" if close else "there is no run yet"


# --- reading -----------------------------------------------------------------------------------


def read(base: str, name: str, now_s: float) -> Run | None:
    """Return what a run's journal tells; None for a directory that is no run's.

    Raises:
        PermissionError: the directory may not be read.
    """
    path = os.path.join(base, name)
    if not is_run(path):
        return None
    events = read_events(os.path.join(path, "events.jsonl"))
    plan = read_plan(path)
    heard = [at for event in events if (at := _number(event.get("at"))) is not None]
    last_at = max(heard, default=_changed_at(path))
    started_at = heard[0] if heard else None
    outcome, ended = _outcome(events, now_s - last_at)
    numbers = [_count(event.get("attempt")) or 0 for event in events]
    return Run(
        id=name,
        path=path,
        outcome=outcome,
        kind=_kind(events) if outcome == FAILED else "",
        status=_count(ended.get("status")),
        reason=_text(ended.get("reason")),
        started_at=started_at,
        took_s=_took_s(outcome, ended, started_at, now_s),
        last_at=last_at,
        attempts=max(numbers, default=0),
        mitigations=_words(_last(events, "attempt").get("mitigations")),
        script=_text(plan.get("script")),
        script_args=_words(plan.get("script_args")),
        process=_mapping(_last(events, "attempt").get("by")),
        lost=sum(_count(event.get("lost")) or 0 for event in events),
    )


def is_run(path: str) -> bool:
    """Return whether a directory holds a run's journal.

    Raises:
        PermissionError: it may not be looked into.
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


def read_plan(path: str) -> dict[str, Any]:
    """Return the plan of a run's first attempt; empty where it cannot be read."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(os.path.join(path, "plan.json"), flags)
    except OSError:
        return {}
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return _mapping(json.loads(os.read(descriptor, _MAX_PLAN) if regular else b"{}"))
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(descriptor)


def _outcome(events: Sequence[Mapping[str, Any]], quiet_s: float) -> tuple[str, Mapping[str, Any]]:
    """Return how a run ended, and the event that says so."""
    ended = _last(events, "end")
    if not ended and _last(events, "ended").get("action") in (retry_policy.STOP, retry_policy.DONE):
        ended = _last(events, "ended")  # all that is missing is the last word
    if ended:
        if ended.get("status") == 0:
            return OK, ended
        return (INTERRUPTED if "asked to end" in _text(ended.get("reason")) else FAILED), ended
    by = _mapping(_last(events, "attempt").get("by"))
    lives = procfs.lives(by) if by else (None if quiet_s < QUIET_S else False)
    return {True: RUNNING, False: INTERRUPTED, None: UNKNOWN}[lives], {}


def _kind(events: Sequence[Mapping[str, Any]]) -> str:
    if kind := _text(_last(events, "ended").get("kind")):
        return kind
    if _last(events, "fault"):
        return "a fault of saferun's own"
    status = _count(_last(events, "end").get("status"))
    return "" if status is None else f"status {status}"


def _took_s(
    outcome: str, ended: Mapping[str, Any], started_at: float | None, now_s: float
) -> float | None:
    if ended:
        return _number(ended.get("s"))
    if outcome == RUNNING and started_at is not None:
        return max(0.0, now_s - started_at)
    return None


def _changed_at(path: str) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


# --- the attempts of one run -------------------------------------------------------------------


def attempts(run: Run) -> list[Attempt]:
    """Return the attempts of a run, in order, with what they left on the disk."""
    found: dict[int, Attempt] = {}
    plan = before = read_plan(run.path)
    number = 0
    for event in read_events(os.path.join(run.path, "events.jsonl")):
        name = event["event"]
        if name == "plan":
            before, plan = plan, _mapping(event.get("plan"))
        elif name == "attempt":
            number = _count(event.get("attempt")) or 0
            found[number] = _begun(number, event, changes(before, plan))
            before = plan
        elif name == "started" and number in found:
            started_at = _number(event.get("at"))
            found[number] = found[number]._replace(started_at=started_at)
        elif name == "ended":
            number = _count(event.get("attempt")) or 0
            found[number] = _over(found.get(number) or _begun(number, {}, ()), event)
    injected = contract.VARIABLE in _mapping(plan.get("env"))
    return [_with_files(run.path, found[number], injected) for number in sorted(found)]


def _begun(number: int, event: Mapping[str, Any], changed: tuple[str, ...]) -> Attempt:
    return Attempt(
        number=number,
        started_at=_number(event.get("at")),
        lived_s=None,
        status=None,
        ended_by="",
        kind="",
        rank=None,
        line="",
        mitigations=_words(event.get("mitigations")),
        changed=changed,
        action="",
        reason="",
        delay_s=0.0,
        signals=(),
        killed=0,
        unkillable=(),
        tails=(),
        hooks=(),
    )


def _over(attempt: Attempt, event: Mapping[str, Any]) -> Attempt:
    kind = _text(event.get("kind")) if event.get("status") != 0 else ""  # "no-failure" is none
    pids = event.get("unkillable")
    return attempt._replace(
        lived_s=_number(event.get("lived_s")),
        status=_count(event.get("status")),
        ended_by=_text(event.get("ended_by")),
        kind=kind,
        rank=_count(event.get("root_rank")),
        line=_deciding_line(event) if kind else "",
        action=_text(event.get("action")),
        reason=_text(event.get("reason")),
        delay_s=_number(event.get("delay_s")) or 0.0,
        signals=_words(event.get("signals")),
        killed=_count(event.get("killed")) or 0,
        unkillable=tuple(p for p in pids if _count(p)) if isinstance(pids, list) else (),
    )


def _deciding_line(event: Mapping[str, Any]) -> str:
    """Return the line that decided; of a fingerprint it is the part behind the kind."""
    said = _text(event.get("root_line"))
    return said or _text(event.get("fingerprint")).partition(":")[2].strip()


def _with_files(path: str, attempt: Attempt, injected: bool) -> Attempt:
    from saferun.journal import receipts

    tails = []
    for stream in ("stdout", "stderr"):
        file = os.path.join(path, f"attempt-{attempt.number}.{stream}")
        try:
            tails.append((file, os.lstat(file).st_size))
        except OSError:
            continue
    told = receipts.read(os.path.join(path, "receipts"), attempt.number)
    # Whether ranks ran unguarded was known to the run alone, which has said it.
    hooks = receipts.judge(told, expects_hooks=injected, ranks_ran=False, no_python=True)
    return attempt._replace(tails=tuple(tails), hooks=hooks)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what a later attempt's plan sets otherwise, as words for people."""
    from saferun.plan.own_variables import OF_ATTEMPT

    if not before or not after:
        return ()  # one of them was not written
    old, new = (_mapping(plan.get("env")) for plan in (before, after))
    skipped = {contract.VARIABLE, *OF_ATTEMPT}
    values = [{n: _mapping(s).get("value") for n, s in env.items()} for env in (old, new)]
    names = [name for name in {**old, **new} if name not in skipped]
    told = [_change(n, *(v.get(n) for v in values)) for n in names]
    trees = [dict(_leaves("hooks", _mapping(p.get("hooks")))) for p in (before, after)]
    told += [_change(key, *(tree.get(key) for tree in trees)) for key in {**trees[0], **trees[1]}]
    words = _words(before.get("command"))
    told += [f"argument {word}" for word in _words(after.get("command")) if word not in words]
    return tuple(filter(None, told))


def _change(name: str, old: Any, new: Any) -> str:
    if old == new:
        return ""
    return f"{name} no longer set" if new is None else f"{name}={new}"


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key, value


# --- what may be garbage -----------------------------------------------------------------------


def _last(events: Iterable[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = {}
    for event in events:
        if event.get("event") == name:
            found = event
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= _MAX_AT and math.isfinite(value) else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _words(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
