"""A run that lives is spared by cleaning, whatever its journal says: two real processes."""

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
from repo import ROOT

from saferun.journal import cleanup
from saferun.journal.event_types import RunEnded
from saferun.journal.writer import Journal
from saferun.system.redact import Masker

LATER = 30 * 24 * 3600.0


def clean(base, **options) -> cleanup.Cleaned:
    return cleanup.clean(str(base), time.time() + LATER, keep=0, **options)


@contextlib.contextmanager
def living(base) -> Iterator[str]:
    """A process whose run has recorded its end and that lives on; gives the run's path."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/programs/journal/live.py"), str(base)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_run_whose_process_lives_is_spared_and_goes_when_it_has_ended(tmp_path, dry_run):
    with living(tmp_path) as path:
        done = clean(tmp_path, dry_run=dry_run)
        assert (done.removed, done.failed, done.kept, done.running) == ((), (), 1, 1)
        assert os.path.exists(path)
    done = clean(tmp_path, dry_run=dry_run)
    assert [run.path for run, _ in done.removed] == [path]
    assert os.path.exists(path) is dry_run


def test_without_its_lock_the_living_run_would_be_removed(tmp_path, monkeypatch):
    """Shows that the test above fails where the lock is missing."""
    monkeypatch.setattr(cleanup, "locked", lambda run: contextlib.nullcontext())
    with living(tmp_path) as path:
        assert [run.path for run, _ in clean(tmp_path).removed] == [path]


def test_a_run_that_another_cleaning_removes_is_spared(tmp_path):
    with living(tmp_path) as path:
        pass
    with filelock.FileLock(f"{path}/run.lock"):
        assert clean(tmp_path).removed == ()
    assert len(clean(tmp_path).removed) == 1


def test_a_run_is_spared_where_the_file_system_has_no_flock(tmp_path, monkeypatch):
    without_flock(monkeypatch)
    journal = Journal.begin(str(tmp_path), "r", Masker({}, []), say=print)
    journal.event(RunEnded(0, ""))
    assert clean(tmp_path).running == 1
    assert not [name for name in os.listdir(journal.path) if name.startswith("run.lock.")]
    journal.close()


def test_a_run_that_has_ended_goes_where_the_file_system_has_no_flock(tmp_path, monkeypatch):
    """In a pid namespace, too, whose name filelock 4.3 wants in the lock."""
    without_flock(monkeypatch)
    run_that_ends(tmp_path)
    assert len(clean(tmp_path).removed) == 1


def test_a_run_is_removed_where_filelock_breaks_a_lock_and_takes_it_only_when_asked_again(
    tmp_path, monkeypatch
):
    """As filelock 4.1 does, the last for Python 3.10."""
    take = filelock.SoftFileLock._acquire

    def break_or_take(lock):
        if os.path.exists(lock.lock_file):
            os.unlink(lock.lock_file)
        else:
            take(lock)

    without_flock(monkeypatch)
    monkeypatch.setattr(filelock.SoftFileLock, "_acquire", break_or_take)
    run_that_ends(tmp_path)
    assert len(clean(tmp_path).removed) == 1


def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)


def run_that_ends(base: Path) -> None:
    """Have a process begin and end a run, and leave its lock."""
    if not (pid := os.fork()):
        journal = Journal.begin(str(base), "r", Masker({}, []), say=print)
        journal.event(RunEnded(0, ""))
        os._exit(0)
    os.waitpid(pid, 0)
