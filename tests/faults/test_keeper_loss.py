"""The keeper is killed or stopped: no line that the job has written is lost."""

import contextlib
import os
import signal
import socket
import threading

import pytest
from cases import slow
from helpers import COMMON, DEADLINE_S, program, python, raw_pty, until
from supervised import supervised

MIB = 1 << 20
ROUNDS = 3


class Reader(threading.Thread):
    """Reads a descriptor to its end."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self.data, self._fd = bytearray(), fd
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):  # a terminal's end
            while data := os.read(self._fd, MIB):
                self.data += data

    def wait_for(self, count: int) -> None:
        """Wait until so many bytes have come."""
        until(lambda: len(self.data) >= count)

    def lines(self) -> list[str]:
        """Wait for the end; return all lines. A write that its writer's death has cut is none."""
        self.join()
        return self.data.decode().split("\n")[:-1]


def assert_all_is_there(lines: list[str], written: int) -> None:
    """Each stream's lines are there once and in order, at least as many as were written."""
    for stream in ("out", "err"):
        found = [line for line in lines if line.startswith(stream)]
        assert found == [f"{stream} {number}" for number in range(1, len(found) + 1)]
        assert len(found) >= written


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STEADILY = ("0.001",)
CASES = [
    (KILL, "pipes", STEADILY),
    (KILL, "terminal", STEADILY),
    (STOP, "pipes", STEADILY),
    *slow((KILL, "one pipe", ()), (STOP, "terminal", ())),
]


@pytest.mark.parametrize(("number", "way", "pause"), CASES)
def test_no_line_is_lost_with_the_keeper(tmp_path, number, way, pause):
    for turn in range(ROUNDS if number == KILL else 1):
        count = tmp_path / f"count-{turn}"
        ends = {"pipes": lambda: (*os.pipe(), *os.pipe()), "one pipe": os.pipe, "terminal": raw_pty}
        mine, out, *more = ends[way]()
        err = more[1] if more else out
        with supervised(
            tmp_path,
            program("numbering.py", str(count), *pause),
            popen={"stdout": out, "stderr": err},
        ) as run:
            for fd in {out, err}:
                os.close(fd)
            readers = [Reader(fd) for fd in (mine, *more[:1])]
            readers[0].wait_for(100 * (turn + 1))  # at another moment
            run.kill("keeper", number)
            ended = run.ended()
            assert ended["ended_by"] == "keeper"
            what = "was killed" if number == KILL else "was stopped and had to be killed"
            assert ended["keeper"] == f"saferun's keeper {what}"
            assert run.living() == {}
        lines = [line for reader in readers for line in reader.lines()]
        assert_all_is_there(lines, int.from_bytes(count.read_bytes(), "little"))
        for fd in (mine, *more[:1]):
            os.close(fd)


def test_output_that_may_be_missing_is_said_to_be(tmp_path):
    ours, theirs = socket.socketpair()
    with (
        ours,
        supervised(
            tmp_path,
            program("numbering.py", str(tmp_path / "count"), *STEADILY),
            popen={"stdout": theirs},
        ) as run,
    ):
        theirs.close()
        assert ours.recv(100)
        run.kill("keeper")
        lost = "saferun's keeper was killed; the last output may be missing"
        assert run.ended()["keeper"] == lost


def test_what_waits_for_a_slow_reader_is_carried_after_the_keepers_death(tmp_path):
    size = 3 * MIB // 2  # more than the reader's pipe holds
    code = COMMON + f"data = bytes({size})\nwhile data: data = data[os.write(1, data):]"
    with supervised(tmp_path, python(code + "\njoin('wrote'); stay()")) as run:
        run.arrived(wrote=1)
        run.kill("keeper")
        run.nothing_lives(run.process.pid)  # it carries the rest
        assert run.ended()["ended_by"] == "keeper"
        assert len(run.out) == size


@pytest.mark.parametrize("asked", ["before the loss is seen", "while the rest is carried"])
@pytest.mark.slow
def test_a_reader_that_takes_nothing_holds_nobody_who_wants_an_end(tmp_path, asked):
    code = COMMON + "join('agent')\nwhile True: os.write(1, bytes(65536))"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        if asked == "before the loss is seen":
            run.process.send_signal(STOP)
            run.kill("keeper")
            run.process.terminate()
            run.process.send_signal(signal.SIGCONT)
        else:
            run.kill("keeper")
            until(lambda: set(run.living()) == {run.process.pid})
            run.process.terminate()
        run.process.wait(DEADLINE_S)


@pytest.mark.slow
def test_a_job_that_ends_well_under_a_stopped_keeper_has_ended_well(tmp_path):
    go = tmp_path / "go"
    code = COMMON + f"join('agent'); wait_for({str(go)!r}); os.write(1, b'done')"
    with supervised(tmp_path, python(code)) as run:
        run.arrived(agent=1)
        run.kill("keeper", STOP)
        go.touch()
        ended = run.ended()
        assert (ended["exit_code"], ended["ended_by"], run.out) == (0, "job", b"done")
