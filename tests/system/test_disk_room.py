"""Room for a checkpoint: what the file system says, and the wait for it."""

import math
import signal
import threading

import pytest

from saferun.system import disk_room

NONE_EVER = "/proc"  # a file system without a single block


def test_room_is_what_the_file_system_says(tmp_path):
    assert disk_room.has(str(tmp_path), 0)
    assert not disk_room.has(str(tmp_path), 1 << 62)
    assert not disk_room.has(NONE_EVER, 0)
    assert disk_room.has(str(tmp_path / "gone"), 1 << 62)  # nobody can ask
    assert not disk_room.wait(NONE_EVER, 1, 0.0)


@pytest.mark.parametrize(
    ("pattern", "folder"),
    [("out/checkpoint-*.pt", "out"), ("out/*/x.pt", "out"), ("out/no/such/x*", "out"), ("x?", "")],
)
def test_the_folder_is_the_last_one_that_is_there(tmp_path, monkeypatch, pattern, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    assert disk_room.folder_of(pattern) == str(tmp_path / folder).rstrip("/")


def test_a_signal_that_asks_for_the_end_ends_the_wait():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        assert disk_room.wait(NONE_EVER, 1, math.inf)
    finally:
        signal.sigtimedwait({signal.SIGTERM}, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
