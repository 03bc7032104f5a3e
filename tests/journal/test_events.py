"""Events are read as they were written, and whatever was cut."""

import json
import os

import pytest

from saferun.base import files
from saferun.diagnosis.attempt_outcome import AttemptOutcome, Decision
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.places import Place
from saferun.diagnosis.work_lost import Saved, WorkLost
from saferun.journal import events
from saferun.journal.event_types import HangSeen, Preflight, RunEnded
from saferun.journal.events import read_raw as read_events
from saferun.model import Finding

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


OUTCOME = AttemptOutcome(
    2,
    137,
    7200.125,
    diagnosis=Diagnosis(
        "segfault",
        root_line="Segmentation fault",
        root_rank=3,
        stack=('File "t.py", line 9 in step',),
        decided_by=("the log, line 9",),
        user_frame="t.py:9  step()",
    ),
    fingerprint="segfault: at N",
    first_step=40,
    ended_by="grace",
    signals=("SIGTERM",),
    killed=2,
    unkillable=(71, 72),
    lost_work=WorkLost(12.5, 40, 0.25, "ck/step_60"),
    saved=(Saved(40.5, 60),),
    decision=Decision("again", "with compile-off", 2.5, "compile-off", ("autotune-off",)),
)
LINE = (  # others read these lines: names and order are fixed
    "attempt status lived_s ended_by signals killed unkillable kind fingerprint root_rank "
    "root_line decided_by stack action reason delay_s add lost_work untried first_step user_frame "
    "saved"
)


@pytest.mark.parametrize(
    "facts",
    [
        OUTCOME,
        HangSeen(9.5, (Place(1, 7, "waits", "t.py:3", True, True, ("a worker",)),), "hang-1.txt"),
        Preflight(False, (Finding("problem", "GPU 0", "it is sick", "", "replace it"),)),
        RunEnded(None, "a fault"),
        RunEnded(143, "stopped", asked=True),
    ],
    ids=lambda facts: type(facts).__name__,
)
def test_an_event_is_read_as_it_was_written(begin, facts):
    journal = begin()
    journal.event(facts)
    (found,) = events.read(journal.path)
    assert found.facts == facts
    if facts is OUTCOME:
        assert list(read_events(f"{journal.path}/events.jsonl")[0])[3:] == LINE.split()


def test_a_directory_in_a_files_place_is_empty_and_leaves_no_descriptor(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    assert files.read(str(tmp_path), 99) == b""
    assert set(os.listdir("/proc/self/fd")) <= before
