"""Events are read whatever was cut."""

from __future__ import annotations

import json
import os

import pytest

from saferun.journal.events import read_raw as read_events

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
