"""The receipts of an attempt's ranks show whether our hooks ran in them, and which failed.

`-I`, `-E` and `-S` skip `sitecustomize` silently, and so does any program that is not Python. Each
process that was started as a rank writes a line at its start (inject/bootstrap.py), so that users
learn if their job ran unguarded. `read` reads the files; the rest is pure.

This module is imported at an attempt's end, never before one starts.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

from saferun.base import files, untrusted
from saferun.base.rank_numbers import ranks_text
from saferun.base.untrusted import is_count
from saferun.inject import contract
from saferun.inject.targets import TARGETS
from saferun.journal import rank_files
from saferun.journal.rank_files import RankFile
from saferun.system.printable import printable

MAX_FILE_BYTES = 1 << 16  # most read of each file: a rank's own receipt is its first line
MAX_BYTES = 1 << 26  # most read of all files together: a thousand full ones
MAX_LINES = 20_000
MAX_REPORTED = 3
_MAX_LOCAL = 4096  # ranks of one machine; a line with more cannot be true
_MAX_ERROR = 200  # characters of an error that are shown
_HEAD = ("at", "pid", "rank", "hook", "outcome")


class Receipt(NamedTuple):
    """One line of one process's receipt."""

    pid: int
    rank: int | None  # None: not a rank of a group
    restart: int  # torchrun's own restarts within the attempt
    at: float  # Unix seconds
    hook: str  # "bootstrap", "compile", …
    outcome: str  # contract.APPLIED, …
    facts: Mapping[str, object]  # the hook's own facts: open, and written by the job


# --- reading -----------------------------------------------------------------------------------


def read(directory: str | None, attempt: int) -> tuple[Receipt, ...]:
    """Return the receipts of an attempt, sorted by restart, rank and pid, then in written order.

    Unreadable files, files that are not ours (links, other users' files) and lines that are no
    receipts are left out. At most MAX_LINES and MAX_BYTES in all, and MAX_FILE_BYTES of each file,
    are read.

    Args:
        directory: the directory of the receipts; None if nothing could be written.
        attempt: the number of the attempt, from 1 on.
    """
    found: list[Receipt] = []
    lines, bytes_left = MAX_LINES, MAX_BYTES
    # The latest restart comes first, since it ended the attempt.
    files = rank_files.of_attempt(directory, attempt, rank_files.RECEIPTS)
    for file in sorted(files, key=lambda file: (-file.restart, file.name)):
        if lines <= 0 or bytes_left <= 0:
            break
        content = _content(directory, file, bytes_left)
        written = content.split(b"\n", lines)[:-1]
        lines, bytes_left = lines - len(written), bytes_left - len(content)
        found += [
            receipt for line in written if (receipt := _parse(line, file.restart)) is not None
        ]
    found.sort(key=lambda one: (one.restart, -1 if one.rank is None else one.rank, one.pid))
    return tuple(found)


def started(receipts: Iterable[Receipt]) -> str:
    """Return how ranks were started, if they may be warm; "" if nothing was noted.

    The job's own processes wrote this to the receipt (contract.py, "start").
    """
    texts = [one.facts.get("start") for one in receipts if one.hook == contract.BOOTSTRAP]
    how, _, rest = next((printable(text) for text in texts if isinstance(text, str)), "").partition(
        " "
    )
    if how == "spawn":
        return f"as usual, not warm: {rest}"
    count, _, seconds = rest.partition(" ")
    if not (count.isdigit() and seconds):
        return ""
    if how == "ahead":
        return f"warm: {count} modules imported ahead, in {seconds} s"
    more = f" and {count} modules" if count != "0" else ""
    return f"warm: torch{more} imported once, ahead, in {seconds} s" if how == "warm" else ""


def met_at(receipts: Iterable[Receipt]) -> float | None:
    """Return when the last rank had joined the first process group; None if there was none."""
    first: dict[int, float] = {}
    joined = (one for one in receipts if (one.hook, one.outcome) == ("init", contract.APPLIED))
    for one in joined:
        if one.restart == 0:
            first[one.pid] = min(one.at, first.get(one.pid, one.at))
    return max(first.values(), default=None)


def nccl(receipts: Iterable[Receipt]) -> tuple[str, int]:
    """Return the version of the ranks' NCCL and the size of the job; ("", 0) if unknown.

    It counts as unknown if a rank runs on another machine, whose saferun decides on its variables.
    """
    seen = {
        one.rank: (one.facts.get("nccl"), one.facts.get("world_size"))
        for one in receipts
        if (one.hook, one.outcome) == ("init", contract.OBSERVED)
    }
    version, size = next(iter(seen.values()), ("", 0))
    alike = set(seen.values()) == {(version, size)} and len(seen) == size
    return (version, size) if alike and isinstance(version, str) and is_count(size) else ("", 0)


def unwritten(directory: str | None, attempt: int) -> bool:
    """Return whether a receipt is empty because the disk was full: the hooks ran in its process."""
    files = rank_files.of_attempt(directory, attempt, rank_files.RECEIPTS)
    return any(not _content(directory, file, 1) for file in files)


def _content(directory: str | None, file: RankFile, bytes_left: int) -> bytes:
    path = os.path.join(directory or "", file.name)
    return files.read_private(path, min(MAX_FILE_BYTES, bytes_left)) or b""


def _parse(line: bytes, restart: int) -> Receipt | None:
    entry = untrusted.value(line)
    if not isinstance(entry, dict) or entry.pop("v", None) != contract.VERSION:
        return None
    at, pid, rank, hook, outcome = (entry.pop(name, None) for name in _HEAD)
    if not (
        is_count(pid)
        and (rank is None or is_count(rank))
        and (isinstance(at, float) or is_count(at))
    ):
        return None
    if not (isinstance(hook, str) and isinstance(outcome, str)):
        return None
    return Receipt(pid, rank, restart, float(at), hook, outcome, entry)


# --- judging -----------------------------------------------------------------------------------


def finished(receipts: Iterable[Receipt]) -> bool:
    """Return whether the scripts of all local ranks ran to their end in the last restart.

    They ended without an exception, but perhaps by `sys.exit` with any status.
    """
    receipts = tuple(receipts)
    latest = max((receipt.restart for receipt in receipts), default=0)
    now = tuple(receipt for receipt in receipts if receipt.restart == latest)
    done = {receipt.rank for receipt in now if receipt.outcome == contract.FINISHED}
    expected = _expected(now)
    return bool(expected) and expected <= done


def missed(receipts: Iterable[Receipt]) -> dict[str, set[int]]:
    """Return the watched modules that ranks of the last restart loaded without their hooks.

    Returns:
        The ranks by module; the set is empty if only processes without a rank did so.
    """
    receipts = tuple(receipts)
    latest = max((receipt.restart for receipt in receipts), default=0)
    states: dict[tuple[int, str], tuple[object, int | None]] = {}
    for receipt in receipts:
        targets = receipt.facts.get("targets")
        if (
            receipt.restart == latest
            and receipt.hook == contract.TARGETS
            and isinstance(targets, dict)
        ):
            for name, state in targets.items():
                states[receipt.pid, name] = state, receipt.rank
    found: dict[str, set[int]] = {}
    for (_, name), (state, rank) in states.items():
        if state == contract.MISSED and name in TARGETS:
            found.setdefault(name, set()).update(() if rank is None else (rank,))
    return found


def judge(
    receipts: Iterable[Receipt],
    *,
    expects_hooks: bool,
    ranks_ran: bool,
    no_python: bool,
    needed: Container[str] = (),
) -> tuple[str, ...]:
    """Return messages for the user about an attempt's hooks: at most three lines.

    Args:
        receipts: the result of `read`.
        expects_hooks: whether hooks were requested for the attempt.
        ranks_ran: whether torchrun certainly started its ranks, early enough (a second) for
            receipts: if one rank fails immediately, torchrun ends those that have not begun.
        no_python: the ranks may be other programs than Python (--no-python, or PYTHON_EXEC):
            missing receipts are reported only if some rank left one.
        needed: the watched modules that a setting in force depends on.
    """
    if not expects_hooks:
        return ()
    receipts = tuple(receipts)
    failed, past = _failed(receipts), _past(receipts, needed)
    lines = (*(_missing(receipts, no_python) if ranks_ran else ()), *failed, *past)
    if len(lines) <= MAX_REPORTED:
        return lines
    rest = len(lines) - MAX_REPORTED + 1
    return (*lines[: MAX_REPORTED - 1], f"{rest} more hooks failed; the receipts have their errors")


def _missing(receipts: tuple[Receipt, ...], no_python: bool) -> tuple[str, ...]:
    present = {receipt.rank for receipt in receipts if receipt.rank is not None}
    if not present:
        line = (
            "the hooks did not run in any rank: was Python started with -I, -E or -S, does it load "
            "another sitecustomize, or is it another program? the job ran unguarded"
        )
        return () if no_python else (line,)
    silent = _expected(receipts) - present
    if not silent:
        return ()
    line = (
        f"the hooks did not run in {ranks_text(silent)}, though in others: was Python started with "
        "-I, -E or -S there, does it load another sitecustomize, or is it another program? that "
        "part of the job ran unguarded"
    )
    return (line,)


def _expected(receipts: tuple[Receipt, ...]) -> set[int]:
    """Return all ranks of the machines with receipts: one machine's ranks are consecutive.

    A script may have changed LOCAL_RANK by its end, so the value at the end does not count.
    """
    ranks: set[int] = set()
    for receipt in receipts:
        if receipt.hook != contract.BOOTSTRAP or receipt.rank is None:
            continue
        if receipt.outcome == contract.FINISHED:
            continue
        local, size = (receipt.facts.get(key) for key in ("local_rank", "local_world_size"))
        if isinstance(local, int) and isinstance(size, int) and 0 <= local < size <= _MAX_LOCAL:
            first = max(receipt.rank - local, 0)
            ranks.update(range(first, first + size))
    return ranks


def _failed(receipts: tuple[Receipt, ...]) -> tuple[str, ...]:
    hooks: dict[str, list[Receipt]] = {}
    for receipt in receipts:
        if receipt.outcome == contract.FAILED:
            hooks.setdefault(_one_line(receipt.hook), []).append(receipt)
    lines = []
    for hook, those in sorted(hooks.items()):
        error = _one_line(str(those[0].facts.get("error", "")) or "no error was given")
        ranks = ranks_text({receipt.rank for receipt in those if receipt.rank is not None})
        lines.append(f"hook {hook} failed in {ranks} and does not hold there: {error}")
    return tuple(lines)


def _hooks(target: str) -> tuple[str, ...]:
    return tuple(hook.partition(".")[0] for hook in TARGETS[target])


def _past(receipts: tuple[Receipt, ...], needed: Container[str]) -> tuple[str, ...]:
    """Return one line about modules that were loaded without their hooks.

    A hook that failed is not named again.
    """
    broken = {receipt.hook for receipt in receipts if receipt.outcome == contract.FAILED}
    found = {
        name: ranks
        for name, ranks in missed(receipts).items()
        if name in needed and not broken.intersection(_hooks(name))
    }
    if not found:
        return ()
    hooks = sorted({hook for name in found for hook in _hooks(name)})
    line = (
        f"{', '.join(sorted(found))}: loaded past saferun, or changed by the script, in "
        f"{ranks_text(set().union(*found.values()))}; what the hook {', '.join(hooks)} sets there "
        "did not hold"
    )
    return (line,)


def _one_line(text: str) -> str:
    """Return a job's text as one short line without control characters."""
    line = " ".join(text.split())[:_MAX_ERROR]
    return printable(line)
