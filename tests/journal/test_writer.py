"""What a run leaves on disk, and that no disk, however bad, stops the job: real file systems."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from repo import ROOT, source

from saferun.journal import disk, event_types, writer
from saferun.journal.events import read_raw as read_events
from saferun.journal.writer import Journal
from saferun.named_tuple import NamedTuple
from saferun.system.redact import MASK, Masker

NOBODY = 65534
SECRET = "s3cr3t-value-0123"
MASKER = Masker({"MY_TOKEN": SECRET}, [])
PLAN = {
    "schema": 1,
    "command": ["torchrun", "t.py", "--hf-token", "abc"],
    "env": {"X_API_KEY": {"value": "short", "origin": "profile", "why": f"for {SECRET}"}},
    "script": "t.py",
}

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount and to be another user")


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def base(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "runs"


@pytest.fixture
def begin(base: pathlib.Path, messages: list[str]) -> Iterator[Callable[..., Journal]]:
    """Begin a run in `base`, or elsewhere."""
    made = []

    def begin(where: pathlib.Path = base, run: str = "r", **clocks: Any) -> Journal:
        made.append(Journal.begin(str(where), run, MASKER, say=messages.append, **clocks))
        return made[-1]

    yield begin
    for journal in made:
        journal.close()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: pathlib.Path) -> pathlib.Path:
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 512):
            pass
    return filler


def events(journal: Journal) -> list[dict]:
    return read_events(f"{journal.path}/events.jsonl")


def names(journal: Journal) -> list[str]:
    return [event["event"] for event in events(journal)]


def noted(name: str, /, **facts: object) -> Any:
    """Return an event that no run writes."""
    kind = type("Noted", (NamedTuple,), {"__annotations__": dict.fromkeys(facts, "object")})
    event_types.NAMES[kind] = name
    return kind(**facts)


def use(journal: Journal) -> None:
    """Do everything once."""
    journal.plan(PLAN)
    journal.event(noted("start"))
    journal.tails(1, b"out", b"err")
    journal.sync()
    journal.receipts()


# When all goes well


def test_a_run_leaves_a_plan_events_tails_and_a_place_for_receipts(begin, base, messages):
    journal = begin(run="20260101-1")
    use(journal)
    assert journal.path == str(base / "20260101-1")
    assert journal.receipts() == str(base / "20260101-1" / "receipts")
    found = {p.name for p in (base / "20260101-1").iterdir()}
    assert found == {
        *("alive", "plan.json", "events.jsonl", "receipts", "run.lock"),
        *("attempt-1.stdout", "attempt-1.stderr"),
    }
    assert messages == []


def test_an_event_is_one_line_with_both_times_its_name_and_its_facts(begin):
    ticks = iter([50.0, 51.23456])
    journal = begin(now=lambda: 1700000000.98765, clock=lambda: next(ticks))
    journal.event(noted("end", code=-11, name="a fact may be called name"))
    (line,) = pathlib.Path(journal.path, "events.jsonl").read_text().splitlines()
    assert line.startswith('{"at": 1700000000.988, "s": 1.235, "event": "end", "code": -11')
    assert json.loads(line)["name"] == "a fact may be called name"


def test_facts_that_json_does_not_know_are_written_as_text(begin):
    journal = begin()
    journal.event(noted("odd", inf=float("inf"), raw=b"\xff", some={1: {2}}, nan=float("nan")))
    (event,) = events(journal)
    assert (event["inf"], event["raw"], event["some"]) == ("inf", "b'\\xff'", {"1": "{2}"})


def test_text_that_is_no_unicode_survives(begin):
    journal = begin()
    journal.event(noted("odd", file="caf\udce9"))
    assert events(journal)[0]["file"] == "caf\udce9"


def test_facts_that_hold_themselves_end(begin):
    loop: dict = {}
    loop["again"] = loop
    journal = begin()
    journal.event(noted("loop", loop=loop))
    assert names(journal) == ["loop"]


def test_everything_is_private_whatever_the_umask(begin, base):
    before = os.umask(0)
    try:
        journal = begin()
        use(journal)
    finally:
        os.umask(before)
    for path in (base, *base.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    assert len(list(base.rglob("*"))) == 8


def test_no_secret_reaches_the_disk(begin, base):
    journal = begin()
    journal.plan(PLAN)
    env, n = {"A_KEY": "short"}, {SECRET: 1}
    journal.event(noted("start", argv=["--token", "abc"], env=env, text=f"x{SECRET}", n=n))
    journal.tails(1, f"a {SECRET} b".encode(), f"{SECRET[5:]} c".encode())
    written = b"".join(p.read_bytes() for p in base.rglob("*") if p.is_file())
    for secret in (SECRET, SECRET[5:], "abc", "short"):
        assert secret.encode() not in written
    plan = json.loads((base / "r" / "plan.json").read_text())
    assert plan["command"] == ["torchrun", "t.py", "--hf-token", MASK]
    assert plan["env"]["X_API_KEY"] == {"value": MASK, "origin": "profile", "why": f"for {MASK}"}
    assert list(plan) == list(PLAN)


def test_the_plan_of_a_later_attempt_is_an_event(begin, base):
    journal = begin()
    journal.plan(PLAN)
    journal.plan({**PLAN, "mitigations": ["fresh-cache"]})
    assert "mitigations" not in json.loads((base / "r" / "plan.json").read_text())
    assert events(journal)[0]["plan"]["mitigations"] == ["fresh-cache"]


def test_an_empty_tail_leaves_no_file(begin, base):
    begin().tails(2, b"", b"x")
    assert [p.name for p in (base / "r").glob("attempt-*")] == ["attempt-2.stderr"]


def descriptors() -> set[int]:
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")}  # less listdir's own


def test_no_descriptor_is_inherited_or_left(begin):
    before = descriptors()
    journal = begin()
    ours = descriptors() - before
    use(journal)
    assert len(ours) == 3  # the directory, the events and the lock
    assert not any(os.get_inheritable(fd) for fd in ours)
    journal.close()
    assert descriptors() == before


def test_what_comes_after_close_is_dropped(begin, messages):
    journal = begin()
    path = journal.path
    journal.close()
    use(journal)
    assert sorted(os.listdir(path)) == ["events.jsonl", "receipts", "run.lock"]
    assert read_events(f"{path}/events.jsonl") == []
    assert messages == []


def test_signals_reach_the_thread_that_waits_and_not_the_journals(begin):
    import signal

    masks = []
    journal = begin()

    def work():
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    journal._disk.do(work, 5.0)
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


# Names


def test_a_name_that_is_taken_gets_a_number_and_the_other_run_is_left_alone(begin, base):
    paths = [begin().path for _ in range(3)]
    assert paths == [str(base / name) for name in ("r", "r-2", "r-3")]


@pytest.mark.parametrize("run", ["../../x", "/etc/x", "..", "", "a\0b"])
def test_a_run_id_never_leads_out_of_the_base(begin, base, run):
    assert os.path.dirname(begin(run=run).path) == str(base)


def test_two_processes_that_begin_the_same_run_get_two_directories(base):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", source("journal/begin_twenty"), base, who],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for who in ("a", "b")
    ]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    for process in started:
        process.stdin.write("x")
        process.stdin.flush()
    paths = {who: p.communicate()[0].split() for who, p in zip("ab", started, strict=True)}
    assert len({*paths["a"], *paths["b"]}) == 40
    for who, mine in paths.items():
        assert all([e["what"] for e in read_events(f"{p}/events.jsonl")] == [who] for p in mine)


# Planted links


def test_a_link_under_the_runs_name_is_not_followed(begin, base, tmp_path):
    base.mkdir(parents=True)
    trap = tmp_path / "trap"
    trap.mkdir()
    (base / "r").symlink_to(trap)
    journal = begin()
    use(journal)
    assert journal.path == str(base / "r-2")
    assert list(trap.iterdir()) == []


@pytest.mark.parametrize("name", ["plan.json", "attempt-1.stdout", ".plan.json.tmp"])
def test_a_link_under_a_files_name_is_replaced_not_followed(begin, base, tmp_path, messages, name):
    target = tmp_path / "target"
    target.write_text("mine")
    journal = begin()
    (base / "r" / name).symlink_to(target)
    use(journal)
    assert target.read_text() == "mine"
    assert not (base / "r" / name).is_symlink()
    assert (base / "r" / "plan.json").is_file()
    assert messages == []


@pytest.mark.parametrize("plant", ["symlink_to", "hardlink_to", "fifo"])
def test_a_link_under_the_name_of_the_events_is_refused(begin, base, tmp_path, messages, plant):
    target = tmp_path / "target"
    target.write_text("mine")
    journal = begin()
    file = base / "r" / "events.jsonl"
    file.unlink()
    os.mkfifo(file) if plant == "fifo" else getattr(file, plant)(target)
    journal.event(noted("start"))
    journal.event(noted("end"))
    assert target.read_text() == "mine"
    assert len(messages) == 1
    assert "does not answer" not in messages[0]  # refused, and not waited for


def test_a_directory_swapped_underneath_gets_nothing(begin, base, tmp_path):
    journal = begin()
    (base / "r").rename(base / "moved")
    (base / "r").mkdir()
    (base / "r" / "receipts").mkdir()
    journal.plan(PLAN)
    journal.event(noted("start"))
    journal.tails(1, b"out", b"err")
    assert [p.name for p in (base / "r").rglob("*")] == ["receipts"]
    assert (base / "moved" / "plan.json").is_file()
    assert journal.receipts() is None  # ranks go by the path


def test_a_link_put_in_place_of_the_directory_just_made_gets_nothing(
    begin, base, tmp_path, messages, monkeypatch
):
    trap = tmp_path / "trap"
    trap.mkdir()
    real = os.mkdir

    def swapped(path, *args, **kwargs):
        real(path, *args, **kwargs)
        if path == "r":
            (base / "r").rmdir()
            (base / "r").symlink_to(trap)

    monkeypatch.setattr(os, "mkdir", swapped)
    use(begin())
    assert list(trap.iterdir()) == []
    assert len(messages) == 1


def test_receipts_that_became_a_link_are_not_offered(begin, base, tmp_path):
    journal = begin()
    (base / "r" / "receipts").rmdir()
    (base / "r" / "receipts").symlink_to(tmp_path)
    assert journal.receipts() is None


def test_the_users_own_link_to_a_larger_disk_is_followed(begin, base, tmp_path, messages):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    base.parent.mkdir()
    base.symlink_to(scratch)
    use(begin())
    assert (scratch / "r" / "plan.json").is_file()
    assert messages == []


@root
def test_somebody_elses_link_in_place_of_the_base_is_refused(begin, base, tmp_path, messages):
    trap = tmp_path / "trap"
    trap.mkdir()
    base.parent.mkdir()
    base.symlink_to(trap)
    os.lchown(base, NOBODY, NOBODY)
    journal = begin()
    use(journal)
    assert (journal.path, list(trap.iterdir()), len(messages)) == (None, [], 1)


# Bad disks


def test_a_base_that_is_a_file_costs_one_line(begin, tmp_path, messages):
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file", tmp_path / "file" / "runs"):
        messages.clear()
        journal = begin(where)
        use(journal)
        assert journal.path is None
        assert journal.receipts() is None
        (line,) = messages
        assert str(where) in line
        assert "the job goes on" in line


def test_a_working_directory_that_vanished_costs_one_line(begin, tmp_path, messages, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    use(begin("runs"))
    assert len(messages) == 1


@root
def test_a_home_of_others_costs_one_line():
    with tempfile.TemporaryDirectory() as closed:  # pytest's own lies below a directory of root's
        os.chmod(closed, 0o755)
        code = [sys.executable, "-c", source("journal/write_as_nobody"), f"{closed}/runs"]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(code, env=environ, capture_output=True, text=True, check=True)
        assert os.listdir(closed) == []
    assert done.stdout.startswith("None 1 cannot write ")
    assert os.strerror(errno.EACCES) in done.stdout


@root
def test_a_read_only_file_system_costs_one_line(begin, small_disk, messages):
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    journal = begin(small_disk / "runs")
    use(journal)
    assert journal.path is None
    assert len(messages) == 1
    assert os.strerror(errno.EROFS) in messages[0]


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


def test_a_disk_that_is_full_from_the_start_costs_one_line(begin, small_disk, messages):
    fill(small_disk)
    use(begin(small_disk))
    assert len(messages) == 1
    assert os.strerror(errno.ENOSPC) in messages[0]


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


@pytest.mark.parametrize("what", ["run", "base"])
def test_a_directory_removed_in_the_middle_costs_one_line(begin, base, messages, what):
    journal = begin()
    journal.event(noted("before"))
    shutil.rmtree(base / "r" if what == "run" else base)
    for _ in range(3):
        use(journal)
    assert len(messages) == 1
    assert journal.receipts() is None
    assert not (base / "r").exists()


def test_events_that_were_deleted_go_on_in_a_new_file(begin, messages):
    journal = begin()
    journal.event(noted("before"))
    os.unlink(f"{journal.path}/events.jsonl")
    journal.event(noted("after"))
    assert names(journal) == ["after"]
    assert messages == []


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


def test_a_dead_file_system_holds_the_run_up_once_and_not_again(begin, hangs, threads, messages):
    journal = begin()
    hangs.clear()
    threads.clear()
    for _ in range(50):
        journal.event(noted("hangs"))
        journal.tails(1, b"a", b"b")
    assert len(threads) == 1
    assert len(messages) == 1
    hangs.set()
    deadline = time.monotonic() + 300
    while "back" not in names(journal) and time.monotonic() < deadline:
        journal.event(noted("back"))
    assert names(journal)[0] == "hangs"  # the one that was on its way
    assert "back" in names(journal)
    assert len(messages) == 1


def test_a_dead_file_system_at_the_beginning_holds_the_run_up_once(
    begin, hangs, threads, messages, monkeypatch
):
    monkeypatch.setattr(writer, "BEGIN_S", 0.2)
    hangs.clear()
    journal = begin()
    use(journal)
    journal.close()
    assert len(threads) == 1
    assert (journal.path, len(messages)) == (None, 1)


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


def test_sync_brings_both_the_events_and_the_directory_to_the_disk(begin, monkeypatch):
    synced = []
    monkeypatch.setattr(writer, "SYNC_S", 300)
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_mode), real(fd)))
    begin().sync()
    assert [stat.S_ISDIR(mode) for mode in synced] == [False, True]


def test_without_threads_the_journal_is_written_all_the_same(begin, messages, monkeypatch):
    def none(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(disk._thread, "start_new_thread", none)
    journal = begin()
    use(journal)
    assert names(journal) == ["start"]
    assert messages == []


# Reading


GOOD = b'{"at": 1, "s": 0, "event": "a"}\n'


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b"", 0),
        (GOOD * 2, 2),
        (GOOD + GOOD[:12], 1),
        (GOOD + GOOD[:12] + b"\n" + GOOD, 2),
        (GOOD[:12] + GOOD, 1),
        (b"\0" * 4096 + GOOD, 1),
        (b"\xff\xfe garbage\n" + GOOD + b'[1]\n"a"\n{}\n{"event": 3}\n', 1),
        (b"[" * 200_000 + b"\n" + GOOD, 1),
        (b"9" * 10_000 + b"\r\n\n\n" + GOOD, 1),
    ],
    ids=["empty", "whole", "cut", "between", "grown-over", "zeros", "garbage", "nested", "number"],
)
def test_events_are_read_whatever_was_cut(tmp_path, content, count):
    (tmp_path / "events.jsonl").write_bytes(content)
    found = read_events(str(tmp_path / "events.jsonl"))
    assert found == [json.loads(GOOD)] * count


def test_what_is_no_file_has_no_events(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name in ("none", "fifo", "", "a\0b"):
        assert read_events(str(tmp_path / name)) == []


# Cost


HEAVY = {"dataclasses", "tempfile", "shutil", "pathlib", "logging", "threading", "json", "inspect"}


def test_beginning_and_writing_import_nothing_more_than_the_lock_needs(base):
    code = [sys.executable, str(ROOT / "tests/programs/journal/begin_and_write.py"), str(base)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(code, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fcntl"]


def test_importing_the_journal_imports_nothing_heavy():
    code = "import sys, saferun.journal.writer; print(*sys.modules)"
    environ = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert not HEAVY & set(done.stdout.split())
