"""What a run leaves on disk when all goes well: its files, their content, their names."""

import errno
import json
import os
import pathlib
import re
import signal
import stat
import subprocess
import sys

from journals import PLAN, SECRET, events, noted, use
from repo import source

from saferun.journal import writer
from saferun.journal.events import read_raw as read_events
from saferun.system import procfs
from saferun.system.redact import MASK


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
    before = procfs.now()
    journal.event(noted("end", code=-11, name="a fact may be called name"))
    alive = int(pathlib.Path(journal.path, "alive").read_text(encoding="utf-8"))
    assert before <= alive <= procfs.now()  # what begins later is not of the run
    (line,) = pathlib.Path(journal.path, "events.jsonl").read_text(encoding="utf-8").splitlines()
    assert line.startswith('{"at": 1700000000.988, "s": 1.235, "event": "end", "code": -11')
    assert json.loads(line)["name"] == "a fact may be called name"


def test_facts_that_json_does_not_know_are_written_as_text(begin):
    odd = {"inf": float("inf"), "raw": b"\xff", "some": {1: {2}}, "file": "caf\udce9"}
    journal = begin()
    journal.event(noted("odd", **odd))
    (event,) = events(journal)
    assert (event["inf"], event["raw"], event["some"]) == ("inf", "b'\\xff'", {"1": "{2}"})
    assert event["file"] == "caf\udce9"


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
    journal.plan({**PLAN, "mitigations": ["fresh-cache"]})  # of a later attempt: an event
    written = b"".join(p.read_bytes() for p in base.rglob("*") if p.is_file())
    for secret in (SECRET, SECRET[5:], "abc", "short"):
        assert secret.encode() not in written
    plan = json.loads((base / "r" / "plan.json").read_text(encoding="utf-8"))
    assert plan["command"] == ["torchrun", "t.py", "--hf-token", MASK]
    assert plan["env"]["X_API_KEY"] == {"value": MASK, "origin": "profile", "why": f"for {MASK}"}
    assert list(plan) == list(PLAN)
    assert events(journal)[1]["plan"]["mitigations"] == ["fresh-cache"]


def descriptors() -> set[int]:
    found = {int(name) for name in os.listdir("/proc/self/fd")}
    return {fd for fd in found if os.path.exists(f"/proc/self/fd/{fd}")}  # less listdir's own


def test_no_descriptor_is_inherited_or_left_and_what_comes_after_close_is_dropped(begin, messages):
    before = descriptors()
    journal = begin()
    path, ours = journal.path, descriptors() - before
    journal.tails(2, b"", b"x")  # an empty one leaves no file
    assert len(ours) == 3  # the directory, the events and the lock
    assert not any(os.get_inheritable(fd) for fd in ours)
    journal.close()
    assert descriptors() == before
    use(journal)
    left = ["attempt-2.stderr", "events.jsonl", "receipts", "run.lock"]
    assert (sorted(os.listdir(path)), messages) == (left, [])
    assert read_events(f"{path}/events.jsonl") == []


def test_signals_reach_the_thread_that_waits_and_not_the_journals(begin):
    masks = []
    journal = begin()

    def work():
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    journal._disk.do(work, 5.0)
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


# Names


def test_many_nodes_that_begin_with_one_name_try_few_of_those_that_are_taken(begin, base):
    """Pods have the same pid; a thousand of them would try half a million names."""
    names = [os.path.basename(begin().path) for _ in range(13)]
    assert names[:10] == ["r", *(f"r-{number}" for number in range(2, 11))]
    assert len(set(names)) == 13
    assert all(re.fullmatch("r-[0-9a-f]{12}", name) for name in names[10:])
    for run in ("../../x", "/etc/x", "..", "", "a\0b"):
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
    paths = {who: p.communicate()[0].splitlines() for who, p in zip("ab", started, strict=True)}
    assert len({*paths["a"], *paths["b"]}) == 40
    for who, mine in paths.items():
        assert all([e["what"] for e in read_events(f"{p}/events.jsonl")] == [who] for p in mine)


def test_sync_brings_both_the_events_and_the_directory_to_the_disk(begin, monkeypatch):
    synced = []
    monkeypatch.setattr(writer, "SYNC_S", 300)
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_mode), real(fd)))
    begin().sync()
    assert [stat.S_ISDIR(mode) for mode in synced] == [False, True]


# Cost


def test_a_place_for_flight_records_is_given_only_where_it_takes_named_pipes(begin, monkeypatch):
    journal = begin()
    assert journal.flight() == f"{journal.path}/flight"
    assert os.listdir(f"{journal.path}/flight") == []
    assert stat.S_IMODE(os.stat(f"{journal.path}/flight").st_mode) == 0o700
    assert journal.flight() == f"{journal.path}/flight", "of another node, or worker"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "as a file system without them does")

    monkeypatch.setattr(os, "mkfifo", refuse)
    assert journal.flight() is None
