"""Remove old runs: only one's own, only ended ones, and nothing that a link leads to.

A run holds a lock while it lives (run_directory.LOCK_FILE). Cleaning tries to take that lock,
without waiting, and keeps it while it removes the run. A run whose lock is held is spared: the run
itself holds it, perhaps on another node, where the journal may not show that it lives, or another
cleaning does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass

from saferun.errors import UnavailableError
from saferun.journal import file_lock
from saferun.journal import reader as runs
from saferun.journal.reader import Run
from saferun.journal.run_directory import LOCK_FILE
from saferun.system import paths

KEEP, OLDER_THAN_DAYS = 20, 14.0  # spared by `clean` by default


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The result of `clean`."""

    removed: tuple[tuple[Run, int], ...]  # with the freed bytes
    failed: tuple[tuple[Run, str], ...]  # with the reason
    kept: int
    running: int  # number kept because they have not, or may not have, ended
    others: int  # number kept because they are another user's or unreadable


def clean(
    base: str,
    now_s: float,
    *,
    older_than_days: float | None = None,
    keep: int | None = None,
    dry_run: bool = False,
) -> Cleaned:
    """Remove our own ended runs that are neither young nor among the newest.

    Args:
        base: the directory of all runs.
        now_s: seconds since the epoch.
        older_than_days: as for `removable`; None: OLDER_THAN_DAYS.
        keep: as for `removable`; None: KEEP.
        dry_run: remove nothing.

    Raises:
        UnavailableError: the directory cannot be read.
    """
    days = OLDER_THAN_DAYS if older_than_days is None else older_than_days
    found, closed = runs.find(base, now_s)
    ours = [run for run in found if mine(run)]
    gone = removable(ours, now_s, older_than_days=days, keep=KEEP if keep is None else keep)
    removed, failed, held = _remove_all(gone, dry_run=dry_run)
    running = sum(run.outcome not in runs.FINISHED for run in ours) + held
    kept = len(found) + closed - len(gone) + len(failed) + held
    return Cleaned(tuple(removed), tuple(failed), kept, running, closed + len(found) - len(ours))


def _remove_all(
    gone: Sequence[Run], *, dry_run: bool
) -> tuple[list[tuple[Run, int]], list[tuple[Run, str]], int]:
    """Remove runs; return the removed ones, the failed ones, and the number of held locks."""
    removed, failed, held = [], [], 0
    for run in gone:
        taken = size(run)
        try:
            with locked(run):
                if not dry_run:
                    remove(run)
            removed.append((run, taken))
        except file_lock.HeldError:
            held += 1
        except FileNotFoundError:  # another process is cleaning, too
            continue
        except OSError as error:
            failed.append((run, error.strerror or str(error)))
    return removed, failed, held


def locked(run: Run) -> contextlib.AbstractContextManager[None]:
    """Return a context in which only our process has this run's lock.

    Entering it raises HeldError if another process has the lock, and OSError if it cannot be taken.
    A run without a lock file has no lock.
    """
    path = os.path.join(run.path, LOCK_FILE)
    if not os.path.lexists(path):
        return contextlib.nullcontext()
    return file_lock.exclusive(path, wait_s=0.0)


def check_cleaned(done: Cleaned) -> None:
    """Raise if something could not be removed.

    Raises:
        UnavailableError: the message names the first of them.
    """
    if done.failed:
        run, why = done.failed[0]
        more = f" and {len(done.failed) - 1} more" if len(done.failed) > 1 else ""
        what = f"run {run.id}{more} could not be removed: {why}"
        raise UnavailableError(what, where=run.path, fix="look at its mode, then clean again")


def removable(
    found: Sequence[Run], now_s: float, *, older_than_days: float, keep: int
) -> tuple[Run, ...]:
    """Return the ended runs that are neither young nor among the newest.

    Args:
        found: the runs, newest first.
        now_s: seconds since the epoch.
        older_than_days: a run with an event in so many last days stays.
        keep: number of the newest runs that stay.
    """
    return tuple(
        run
        for run in found[keep:]
        if run.outcome in runs.FINISHED and now_s - run.last_at >= older_than_days * runs.DAY_S
    )


def mine(run: Run) -> bool:
    """Return whether a run's directory belongs to this process's user."""
    try:
        status = os.lstat(run.path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def size(run: Run) -> int:
    """Return the disk space of a run's directory in bytes; links are not followed."""
    total = 0
    for place, directories, files in os.walk(run.path):
        for name in (*directories, *files):
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except OSError:
                continue
    return total


def remove(run: Run) -> None:
    """Remove a run's directory and nothing that a link in it leads to.

    The files that mark it as a run go last, so a partly removed run is still listed.

    Raises:
        OSError: the directory, or a part of it, cannot be removed, is not ours or is no run's any
            more.
    """
    paths.remove_dir(run.path, _empty)


def _empty(descriptor: int) -> None:
    """Remove the content of a run's open directory, wherever its name now leads."""
    if os.fstat(descriptor).st_uid != os.geteuid():
        raise PermissionError(1, "it is another user's")
    names = os.listdir(descriptor)
    if not any(name in names for name in runs.MARKS):
        raise FileNotFoundError(2, "it no longer belongs to a run")
    last = [name for name in (*runs.MARKS, LOCK_FILE) if name in names]
    for name in [*(n for n in names if n not in last), *last]:
        status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            shutil.rmtree(f"/proc/self/fd/{descriptor}/{name}")
        else:
            os.unlink(name, dir_fd=descriptor)
