"""Mitigations that helped are found again, for the same script on the same machine only."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import pytest
from repo import ROOT

from saferun.journal import file_lock, mitigation_history
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


@pytest.mark.parametrize("field", Key._fields)
def test_another_script_gpu_torch_or_driver_is_another_matter(field):
    other = KEY._replace(**{field: "other"})
    assert mitigation_history.recall([entry()], KEY, (), NOW) == (entry(),)
    assert mitigation_history.recall([entry()], other, (), NOW) == ()


def test_a_mitigation_that_costs_nothing_holds_for_any_arguments_and_for_good():
    assert mitigation_history.recall([entry()], KEY, ("--new",), NOW + 100 * RETRY_WITHOUT_S)


@pytest.mark.parametrize(
    ("arguments", "later_s", "found"),
    [
        (("--a",), 0.0, True),
        (("--a",), RETRY_WITHOUT_S - 1, True),
        (("--a",), RETRY_WITHOUT_S, False),
        (("--a",), -10.0, False),
        (("--b",), 0.0, False),
    ],
    ids=["same", "within the week", "after it", "learned in the future", "other arguments"],
)
def test_a_mitigation_that_costs_holds_for_its_arguments_and_a_week(arguments, later_s, found):
    costs = entry(arguments=("--a",))
    assert bool(mitigation_history.recall([costs], KEY, arguments, NOW + later_s)) is found


def test_mitigations_come_back_in_the_order_in_which_they_were_learned():
    first, second = entry("a", at=NOW), entry("b", at=NOW + 5)
    assert mitigation_history.recall([second, first], KEY, (), NOW + 9) == (first, second)


def test_a_mitigation_that_is_learned_anew_has_its_new_time():
    old, new = entry(arguments=("--a",)), entry(arguments=("--a",), at=NOW + 10)
    assert mitigation_history.merge([old, entry("b")], [new]) == (new, entry("b"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"[]",
        b'{"schema": 2, "mitigations": []}',
        b'{"schema": 1, "mitigations": [{}]}',
        b"\xff",
    ],
    ids=["empty", "no JSON", "a list", "another schema", "half an entry", "no text"],
)
def test_a_broken_file_is_an_empty_history(environ, content):
    path = Path(mitigation_history.path(environ))
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(content)
    assert mitigation_history.load(environ) == ()


def test_a_planted_link_is_not_read(environ, tmp_path):
    target = tmp_path / "theirs.json"
    target.write_text(json.dumps({"schema": 1, "mitigations": []}))
    path = mitigation_history.path(environ)
    os.makedirs(os.path.dirname(path), mode=0o700)
    os.symlink(target, path)
    assert mitigation_history.load(environ) == ()


def test_the_file_does_not_grow_for_ever(environ):
    many = [entry(f"c{n}", at=NOW + n) for n in range(mitigation_history.ENTRIES + 20)]
    mitigation_history.change(environ, lambda _: tuple(many))
    assert mitigation_history.load(environ) == tuple(many[20:])


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
    document = mitigation_history._document([entry()])

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
    monkeypatch.setattr(mitigation_history, "LOCK_S", 0.1)
    with filelock.FileLock(f"{path}.lock"), pytest.raises(file_lock.HeldError):
        learn(environ)
    assert mitigation_history.load(environ) == ()
    learn(environ)
    assert mitigation_history.load(environ) == (entry(),)


def test_a_disk_that_does_not_answer_costs_a_bounded_wait(environ, monkeypatch):
    answers = threading.Event()
    monkeypatch.setattr(mitigation_history, "DISK_S", 0.1)
    monkeypatch.setattr(mitigation_history, "load", lambda _: answers.wait() and ())
    with pytest.raises(OSError, match="does not answer"):
        learn(environ)
    answers.set()


def test_a_home_that_cannot_be_written_is_an_error_of_the_disk(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="cannot be used"):
        learn({"HOME": str(tmp_path / "file")})


def test_where_the_file_system_has_no_flock_a_file_is_the_lock(environ, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", none)
    path = f"{mitigation_history.path(environ)}.lock"
    monkeypatch.setattr(mitigation_history, "LOCK_S", 0.1)
    learn(environ)
    assert mitigation_history.load(environ) == (entry(),)
    with filelock.SoftFileLock(path), pytest.raises(file_lock.HeldError):
        learn(environ)
