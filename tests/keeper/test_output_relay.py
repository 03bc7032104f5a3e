"""An output that several jobs write to: whole lines, but a prompt is not kept back for long."""

import os
from collections.abc import Callable, Iterator

import pytest

from saferun.keeper import output_relay
from saferun.keeper.output_ends import OutputPipes
from saferun.keeper.output_relay import Channel


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], tuple[int, int]]]:
    """Return the job's end of a shared channel and the reader's, once it has been started."""
    reading, writing = os.pipe()
    noticed, notify = os.pipe()

    def start(line_s: float) -> tuple[int, int]:
        monkeypatch.setattr(output_relay, "LINE_S", line_s)
        ours, inner = os.pipe()
        channel = Channel(OutputPipes(writing, ours, os.dup(inner)), 100, notify, shared=True)
        channel.start()
        channel.release()
        return inner, reading

    yield start
    os.read(noticed, 1)  # the channel's thread has nothing more to do with these
    for fd in (reading, writing, noticed, notify):
        os.close(fd)


def test_a_line_is_passed_on_whole(ends, monkeypatch):
    monkeypatch.setattr(output_relay, "LINE_BYTES", 8)
    job, reader = ends(600.0)
    os.write(job, b"x" * 10)
    assert os.read(reader, 100) == b"x" * 10, "it has no end for too long"
    os.write(job, b"one\ntw")
    assert os.read(reader, 100) == b"one\n"
    os.write(job, b"o\nthr")
    assert os.read(reader, 100) == b"two\n"
    os.close(job)
    assert os.read(reader, 100) == b"thr"


def test_a_line_without_an_end_is_passed_on_when_its_time_is_over(ends):
    job, reader = ends(0.001)
    os.write(job, b"prompt? ")
    assert os.read(reader, 100) == b"prompt? "
    os.close(job)
