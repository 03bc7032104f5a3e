"""The table of an attempt's life: what follows from each event, by the commands that are sent."""

import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest

from saferun.diagnosis.evidence import Hang
from saferun.keeper import protocol
from saferun.supervise.attempt import attempt_life
from saferun.supervise.attempt.attempt_life import AttemptLife
from saferun.supervise.attempt.attempt_values import AttemptSpec, Observer
from saferun.supervise.ready.keeper_pool import Standby
from saferun.system.signalfd import Signals

STARTED, EXITED = protocol.Started(7, True, ""), protocol.Exited(2.5, 0)
ENDED = protocol.Ended(0, 0, [], (b"", b""))
KILL = protocol.Kill()


def signalled(number: int) -> protocol.Signal:
    return protocol.Signal(number, None)


class DrivenAttempt(Observer):
    """A life with a keeper that only takes commands, and a clock that a test moves."""

    def __init__(
        self, keeper: subprocess.Popen[bytes], commands: int, received: int, **spec: object
    ) -> None:
        self.now = 1000.0
        self.calls: list[object] = []
        self.again_s = float("inf")
        self.looks: list[float] = []
        self.cause: Hang | None = None
        self._inbox = protocol.Inbox(received)
        self.keeper = keeper
        standby = Standby(self.keeper.pid, commands, -1, [])
        attempt = AttemptSpec(["job"], {}, **spec)  # type: ignore[arg-type]  # fields of several types
        self.life = AttemptLife(standby, attempt, self, lambda: self.now)

    def started(self, keeper: int, launcher: int) -> None:
        self.calls.append((keeper, launcher))

    def look(self) -> float:
        self.looks.append(self.now)
        return self.again_s

    def reports(self, *reports: protocol.Report) -> None:
        for report in reports:
            self.life.step(type(report), report)

    def signal(self, number: int, sender: str = "") -> None:
        self.life.take_signal(number, sender)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.life.take_time()

    def sent(self) -> list[protocol.Message]:
        """Return the commands since the last call."""
        try:
            return self._inbox.read()
        except BlockingIOError:
            return []


@pytest.fixture
def driven_attempt() -> Iterator[Callable[..., DrivenAttempt]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with subprocess.Popen(["sleep", "1000"]) as keeper:
        yield lambda **spec: DrivenAttempt(keeper, writing, reading, **spec)
        keeper.kill()
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("launcher", ["torchrun", "python"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), (STARTED, EXITED, ENDED)),
        ((), (protocol.Failed("job", "gone"),)),
        ((), ()),
        ((STARTED,), (EXITED, ENDED)),
        ((STARTED,), ()),
        ((STARTED, EXITED), (ENDED,)),
        ((STARTED, EXITED), ()),
    ],
    ids=lambda reports: " ".join(type(report).__name__ for report in reports) or "-",
)
def test_whatever_signals_come_the_attempt_comes_to_its_end(
    driven_attempt, launcher, before, after
):
    """Without a report after the signals the keeper dies."""
    pairs = list(itertools.product(attempt_life.ALL_SIGNALS, repeat=2))
    for first, *then in [*pairs, *((a, b, b, b) for a, b in pairs)]:
        run = driven_attempt(launcher=launcher, grace_s=0.5)
        run.reports(*before)
        for number in (first, *then[:-1]):
            run.signal(number)
            run.passes(0.2)
        for report in after:
            run.reports(report)
            run.signal(then[-1])
        if not after:
            run.life.step(attempt_life.KEEPER_GONE)
        for number in attempt_life.ALL_SIGNALS:
            run.signal(number)
        assert run.life.state in attempt_life.OVER
        run.sent()


def test_a_look_comes_at_the_start_and_after_the_seconds_that_the_last_one_asked_for(
    driven_attempt,
):
    run = driven_attempt()
    run.again_s = 30.0
    run.reports(STARTED)
    run.passes(0.0)
    run.passes(29.0)
    assert run.looks == [1000.0]
    run.passes(1.0)
    assert run.looks == [1000.0, 1030.0]
    run.reports(EXITED)
    run.passes(30.0)
    assert run.looks == [1000.0, 1030.0]


@pytest.mark.parametrize("asked", [False, True], ids=["while it runs", "while it ends"])
def test_a_cause_ends_the_job_once_and_none_that_ends_already(driven_attempt, asked):
    run = driven_attempt(grace_s=30.0)
    run.again_s = 1.0
    run.reports(STARTED)
    if asked:
        run.signal(signal.SIGTERM)
    run.sent()
    run.cause = Hang("hang", None, "nobody moves")
    run.passes(0.0)
    run.passes(1.0)
    assert run.sent() == ([] if asked else [protocol.Kill()])
    assert len(run.looks) == (2 if asked else 1)


def test_second_interrupt_kills_but_an_echo_of_the_first_does_not(driven_attempt):
    run = driven_attempt(grace_s=30.0)
    run.reports(STARTED)
    run.signal(signal.SIGINT)
    run.passes(0.1 - 0.01)
    run.signal(signal.SIGINT)
    assert run.sent() == [signalled(signal.SIGINT)]
    run.passes(0.02)
    run.signal(signal.SIGINT)
    assert run.sent() == [KILL]
    assert run.life.ended_by == "interrupt"


def test_job_that_was_asked_before_it_ran_is_killed_when_its_time_is_over(driven_attempt):
    run = driven_attempt(grace_s=30.0)
    run.signal(signal.SIGTERM)
    run.signal(signal.SIGTERM)
    run.reports(STARTED)
    run.passes(29.9)
    assert run.sent() == [signalled(signal.SIGTERM)]
    run.passes(0.2)
    assert run.sent() == [KILL]
    run.reports(EXITED, ENDED)
    assert (run.life.ended_by, run.life.interrupted) == ("grace", True)


def test_signal_while_only_output_is_left_ends_the_wait_for_its_reader(driven_attempt):
    for number in (signal.SIGINT, signal.SIGTERM):
        run = driven_attempt()
        run.reports(STARTED, EXITED)
        run.signal(number)
        assert run.sent() == [KILL]
        assert (run.life.ended_by, run.life.interrupted) == ("job", True)


def test_what_slurm_sends_to_the_whole_step_is_not_sent_again(driven_attempt):
    run = driven_attempt()
    run.reports(STARTED)
    run.signal(signal.SIGTERM, Signals.STEP)
    assert run.sent() == []
    assert run.life.forwarded == ["SIGTERM"]
    early = driven_attempt()
    early.signal(signal.SIGTERM, Signals.STEP)
    assert early.sent() == [signalled(signal.SIGTERM)]


def test_command_in_our_group_gets_what_no_key_sends_each_time_and_an_interrupt_sets_no_limit(
    driven_attempt,
):
    run = driven_attempt(launcher="python", grace_s=30.0)
    run.reports(STARTED)
    run.signal(signal.SIGINT, Signals.KERNEL)
    run.passes(1)
    run.signal(signal.SIGINT)
    assert run.sent() == [signalled(signal.SIGINT)]
    run.passes(10)
    assert run.life.left_ms() == float("inf")
    for _ in range(2):
        run.signal(signal.SIGTERM)
    assert run.sent() == [signalled(signal.SIGTERM)] * 2
    assert run.life.left_ms() == pytest.approx(30_000)


def test_signal_of_the_last_moment_counts_as_an_interruption(driven_attempt):
    run = driven_attempt()
    run.reports(STARTED, EXITED, ENDED)
    run.signal(signal.SIGUSR1)
    run.signal(signal.SIGWINCH)
    assert not run.life.interrupted
    run.signal(signal.SIGTERM)
    assert run.life.interrupted
    assert run.sent() == []
