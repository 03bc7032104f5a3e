"""No disk, however bad, stops the job: real file systems, full, closed, gone or dead."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest
from journals import PLAN, names, noted, use
from repo import source
from rights import needs

from saferun.journal import disk, writer


def fill(place: pathlib.Path) -> pathlib.Path:
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 512):
            pass
    return filler


def test_a_base_that_cannot_be_made_costs_one_line(begin, tmp_path, messages, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for where in (tmp_path / "file", tmp_path / "file" / "runs", "runs"):
        messages.clear()
        journal = begin(where)
        use(journal)
        assert (journal.path, journal.receipts()) == (None, None)
        (line,) = messages
        assert str(where) in line
        assert "the job goes on" in line


@needs("become others")
def test_a_home_of_others_costs_one_line():
    with tempfile.TemporaryDirectory() as closed:  # pytest's own lies below a directory of root's
        os.chmod(closed, 0o755)
        code = [sys.executable, "-c", source("journal/write_as_nobody"), f"{closed}/runs"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(code, env=environ, capture_output=True, text=True, check=True)
        assert os.listdir(closed) == []
    assert done.stdout.startswith("None 1 cannot write ")
    assert os.strerror(errno.EACCES) in done.stdout


@needs("mount")
def test_a_file_system_that_takes_nothing_costs_one_line(begin, small_disk, messages):
    filler = fill(small_disk)
    journal = begin(small_disk)
    use(journal)
    journal.close()
    (line,) = messages
    assert os.strerror(errno.ENOSPC) in line
    filler.unlink()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    journal = begin(small_disk / "runs")
    use(journal)
    assert (journal.path, len(messages)) == (None, 2)
    assert os.strerror(errno.EROFS) in messages[1]


def test_a_disk_that_was_full_for_a_while_has_the_later_events_whole(begin, small_disk, messages):
    journal = begin(small_disk)
    journal.event(noted("before"))
    filler = fill(small_disk)
    for n in range(200):
        journal.event(noted("full", n=n, text="x" * 100))
    journal.plan(PLAN)
    journal.tails(1, b"x" * 5000, b"y" * 5000)
    assert len(messages) == 1
    filler.unlink()
    journal.event(noted("after"))
    journal.plan(PLAN)
    journal.tails(2, b"", b"y" * 5000)
    lines = pathlib.Path(journal.path, "events.jsonl").read_bytes().splitlines()
    written = [json.loads(line) for line in lines]  # every line is whole
    assert written[0]["event"] == "before"
    assert written[-1]["event"] == "after"
    assert written[-1]["lost"] == 200 - (len(written) - 2)
    found = {p.name for p in pathlib.Path(journal.path).iterdir()}
    assert found == {
        *("alive", "events.jsonl", "receipts", "run.lock", "plan.json", "attempt-2.stderr")
    }
    assert len(messages) == 1


def test_a_limit_on_the_size_of_files_cuts_no_line_in_two(base):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = [sys.executable, "-c", source("journal/write_with_file_limit"), str(base)]
    done = subprocess.run(code, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("1 cannot write ")
    lines = (base / "r" / "events.jsonl").read_bytes().splitlines()
    written = [json.loads(line) for line in lines]
    assert [e["event"] for e in written] == ["fault"] * (len(lines) - 1) + ["end"]
    assert 2 < len(lines) < 20
    assert not (base / "r" / "attempt-1.stdout").exists()


def test_half_a_line_that_cannot_be_taken_back_spoils_no_other(begin, monkeypatch):
    journal = begin()
    journal.event(noted("before"))
    write = os.write

    def half(descriptor, data):
        write(descriptor, bytes(data)[: len(data) // 2])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def broken(descriptor, size):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", half)
        patched.setattr(os, "ftruncate", broken)
        journal.event(noted("cut"))
    journal.event(noted("after"))
    assert names(journal) == ["before", "after"]
    last = pathlib.Path(journal.path, "events.jsonl").read_bytes().splitlines()[-1]
    assert json.loads(last)["event"] == "after"  # on a line of its own


@pytest.mark.parametrize("what", ["r", ""], ids=["run", "base"])
def test_a_directory_removed_in_the_middle_costs_one_line(begin, base, messages, what):
    journal = begin()
    journal.event(noted("before"))
    os.unlink(f"{journal.path}/events.jsonl")
    journal.event(noted("after"))  # in a new file
    assert (names(journal), messages) == (["after"], [])
    shutil.rmtree(base / what)
    for _ in range(3):
        use(journal)
    assert len(messages) == 1
    assert journal.receipts() is None
    assert not (base / "r").exists()


# A disk that does not answer


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let what the journal's threads do hang until told otherwise, as a dead NFS mount does."""
    monkeypatch.setattr(writer, "WRITE_S", 0.2)
    monkeypatch.setattr(writer, "SYNC_S", 0.2)
    answers = threading.Event()
    answers.set()
    real = {name: getattr(os, name) for name in ("fstat", "mkdir")}
    main = threading.get_ident()

    def slow(name):
        def call(*args, **kwargs):
            if threading.get_ident() != main:
                answers.wait(300)
            return real[name](*args, **kwargs)

        return call

    for name in real:
        monkeypatch.setattr(os, name, slow(name))
    yield answers
    answers.set()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the journal's disk has started a thread for: each may be waited for once."""
    started: list[object] = []
    real = disk._start
    monkeypatch.setattr(
        disk, "_start", lambda work, *rest: (started.append(work), real(work, *rest))
    )
    return started


def test_a_dead_file_system_holds_the_run_up_once_and_not_again(
    begin, hangs, threads, messages, monkeypatch
):
    journal = begin()
    hangs.clear()
    threads.clear()
    for _ in range(50):
        journal.event(noted("hangs"))
        journal.tails(1, b"a", b"b")
    assert (len(threads), len(messages)) == (1, 1)
    monkeypatch.setattr(writer, "BEGIN_S", 0.2)
    other = begin()  # dead from the beginning
    use(other)
    other.close()
    assert (len(threads), other.path, len(messages)) == (2, None, 2)
    hangs.set()
    deadline = time.monotonic() + 300
    while "back" not in names(journal) and time.monotonic() < deadline:
        journal.event(noted("back"))
    assert names(journal)[0] == "hangs"  # the one that was on its way
    assert "back" in names(journal)
    assert len(messages) == 2


def test_a_slow_sync_costs_no_event_and_no_word(begin, messages, monkeypatch):
    journal = begin()
    answers, asked = threading.Event(), []
    monkeypatch.setattr(writer, "SYNC_S", 0.2)
    monkeypatch.setattr(os, "fsync", lambda fd: (asked.append(fd), answers.wait(300)))
    for _ in range(20):
        journal.sync()
        journal.event(noted("goes on"))
    assert len(asked) == 1
    answers.set()
    assert names(journal) == ["goes on"] * 20
    assert messages == []


def test_without_threads_the_journal_is_written_all_the_same(begin, messages, monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(disk._thread, "start_new_thread", none)
    journal = begin()
    use(journal)
    assert names(journal) == ["start"]
    assert messages == []
