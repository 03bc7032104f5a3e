"""Mitigations that helped are found again, for the same script on the same machine only."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import pytest
from repo import ROOT

from saferun.journal import file_lock, history_file, mitigation_history
from saferun.journal.history_file import HistoryFile
from saferun.journal.mitigation_history import RETRY_WITHOUT_S, Entry, Key

KEY = Key("/w/train.py", "NVIDIA H200", "2.13.0", "570.86")
NOW = 1_800_000_000.0
PROGRAMS = ROOT / "tests/programs/journal"


def entry(
    mitigation: str = "autotune-off", *, arguments=None, at: float = NOW, key: Key = KEY
) -> Entry:
    return Entry(key, mitigation, "inductor-autotune-error", arguments, at)


@pytest.fixture
def environ(home: Path) -> dict[str, str]:
    return {"HOME": str(home)}


def test_what_was_saved_is_there_again(environ):
    kept = (entry(), entry("compile-off", arguments=("--lr", "1e-3"), at=NOW + 1))
    mitigation_history.change(environ, lambda _: kept)
    assert mitigation_history.load(environ) == kept
    path = mitigation_history.path(environ)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    many = tuple(entry(f"c{n}", at=NOW + n) for n in range(history_file.ENTRIES + 20))
    mitigation_history.change(environ, lambda _: many)
    assert mitigation_history.load(environ) == many[20:]


def test_a_mitigation_is_recalled_for_the_same_case_alone():
    costs, free = entry(arguments=("--a",)), entry("b", at=NOW + 5)
    for arguments, later_s, found in (
        (("--a",), 6.0, (costs, free)),  # in the order in which they were learned
        (("--a",), RETRY_WITHOUT_S - 1, (costs, free)),
        (("--a",), RETRY_WITHOUT_S, (free,)),
        (("--a",), -10.0, (free,)),  # learned in the future
        (("--b",), 100 * RETRY_WITHOUT_S, (free,)),
    ):
        assert mitigation_history.recall([free, costs], KEY, arguments, NOW + later_s) == found
    for field in Key._fields:
        other = KEY._replace(**{field: "other"})
        assert mitigation_history.recall([free], other, (), NOW) == ()
    anew = entry(arguments=("--a",), at=NOW + 10)
    assert mitigation_history.merge([costs, free], [anew]) == (anew, free)


def test_a_broken_or_planted_file_is_an_empty_history(environ, tmp_path):
    path = Path(mitigation_history.path(environ))
    path.parent.mkdir(parents=True, mode=0o700)
    schema = (b'{"schema": 2, "mitigations": []}', b'{"schema": 1, "mitigations": [{}]}')
    for content in (b"", b"garbage", b"[]", *schema, b"\xff"):
        path.write_bytes(content)
        assert mitigation_history.load(environ) == ()
    mitigation_history.change(environ, lambda _: (entry(),))
    path.rename(tmp_path / "theirs.json")
    path.symlink_to(tmp_path / "theirs.json")
    assert mitigation_history.load(environ) == ()


# Two processes at once


def add(environ, name: str, *pause: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / "add_mitigation.py"), name, *pause],
        env={**os.environ, **environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("lock", "report", "kept"),
    [({}, "held", {"first", "second"}), ({"NO_LOCK": "1"}, "done", {"first"})],
    ids=["with the lock", "without it, the second is lost"],
)
def test_what_two_runs_learn_at_the_same_time_is_kept_of_both(environ, lock, report, kept):
    environ.update(lock)
    with add(environ, "first", "pause") as first:
        assert first.stdout.readline() == "read\n"  # and has not written yet
        with add(environ, "second") as second:
            assert second.stdout.readline() == f"{report}\n"
            first.stdin.close()
            assert first.stdout.readline() == "done\n"
            if report != "done":
                assert second.stdout.readline() == "done\n"
    assert {entry.key.script for entry in mitigation_history.load(environ)} == kept


def learn(environ) -> None:
    mitigation_history.change(environ, lambda known: mitigation_history.merge(known, [entry()]))


def test_nodes_that_learn_the_same_at_once_write_it_once(environ):
    """All nodes of a run end together, with a clock and an entry each."""
    mitigation_history.keep(environ, [entry(at=NOW)])
    written = Path(mitigation_history.path(environ)).stat().st_ino
    mitigation_history.keep(environ, [entry(at=NOW + 1)])
    assert Path(mitigation_history.path(environ)).stat().st_ino == written
    mitigation_history.keep(environ, [entry(at=NOW + mitigation_history.KEPT_S)])
    assert [e.at for e in mitigation_history.load(environ)] == [NOW + mitigation_history.KEPT_S]
    mitigation_history.keep(environ, [entry("compile-off", at=NOW)])
    assert len(mitigation_history.load(environ)) == 2


def test_a_node_that_does_not_get_the_lock_is_content_with_what_another_one_wrote(
    environ, monkeypatch
):
    mitigation_history.change(environ, lambda _: ())
    path = mitigation_history.path(environ)
    document = mitigation_history.HISTORY._document((entry(),))

    def another_writes(*_):
        Path(path).write_bytes(document)
        raise file_lock.HeldError(errno.EAGAIN, "another process holds it", path)

    monkeypatch.setattr(mitigation_history, "change", another_writes)
    mitigation_history.keep(environ, [entry(at=NOW + 1)])
    with pytest.raises(file_lock.HeldError):
        mitigation_history.keep(environ, [entry("compile-off")])


def test_a_lock_that_another_process_keeps_costs_a_bounded_wait(environ, monkeypatch):
    path = mitigation_history.path(environ)
    os.makedirs(os.path.dirname(path), mode=0o700)
    monkeypatch.setattr(history_file, "LOCK_S", 0.1)
    with filelock.FileLock(f"{path}.lock"), pytest.raises(file_lock.HeldError):
        learn(environ)
    assert mitigation_history.load(environ) == ()
    learn(environ)
    assert mitigation_history.load(environ) == (entry(),)
    with pytest.raises(OSError, match="cannot be used"):
        learn({"HOME": path})  # a file


def test_a_disk_that_does_not_answer_costs_a_bounded_wait(environ, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(history_file, "DISK_S", 0.1)
    monkeypatch.setattr(HistoryFile, "load", lambda *_: answers.wait() and ())
    with pytest.raises(OSError, match="does not answer"):
        learn(environ)
    answers.set()


def test_where_the_file_system_has_no_flock_a_file_is_the_lock(environ, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    path = f"{mitigation_history.path(environ)}.lock"
    monkeypatch.setattr(history_file, "LOCK_S", 0.1)
    learn(environ)
    assert mitigation_history.load(environ) == (entry(),)
    with filelock.SoftFileLock(path), pytest.raises(file_lock.HeldError):
        learn(environ)
