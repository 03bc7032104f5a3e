"""What happens after an attempt, as a table: history and policies in, decision out."""

import pytest
from cases import check_cases
from hypothesis import given
from hypothesis import strategies as st
from outcomes import outcome

from saferun.diagnosis.attempt_outcome import ASKED, REPLACED, AttemptOutcome, Decision
from saferun.diagnosis.deciding.retry_policy import (
    AGAIN,
    DEBUG,
    DONE,
    GUARDS,
    STOP,
    decide,
    left,
    used_up,
)
from saferun.diagnosis.evidence import NoNumber
from saferun.settings import Settings, with_values

POLICY = Settings()


def allowing(**changes: object) -> Settings:
    """The default settings with some keys of `retry` and `mitigate` replaced."""
    given = {f"{group}.{key}": v for group in ("retry", "mitigate") for key, v in changes.items()}
    return with_values(POLICY, given)


def failed(number: int, verdict: str = "retry", **facts) -> AttemptOutcome:
    """An attempt that failed after an age that no other attempt has."""
    usual = {
        "number": number,
        "exit_code": 1,
        "kind": "k",
        "verdict": verdict,
        "mitigations": (),
        "fingerprint": "k: line",
        "lived_s": 100.0 * 1.5**number,
        "ended_s": 1000.0 * number,
    }
    return outcome(**{**usual, **facts})


def attempts(count: int, verdict: str = "retry", **facts) -> list[AttemptOutcome]:
    return [failed(n, verdict, **facts) for n in range(1, count + 1)]


def without_loss(
    number: int, step: int | None, good: str = "2.0", epoch: int | None = None
) -> AttemptOutcome:
    """An attempt that resumed, and was ended at this step since its loss was no number."""
    lost = NoNumber("nan", step, good, None, 0.0, epoch)
    return failed(number, fingerprint=str(number), first_step=10 * number, no_number=lost)


def case(*history: AttemptOutcome, **changes: object) -> tuple[list[AttemptOutcome], Settings]:
    return list(history), allowing(**changes)


OUTSIDE = {"group": "io-network", "waits": True}
STORAGE = {**OUTSIDE, "kind": "stale-file-handle"}
TRIED_AGAIN = {
    "a fault of the outside that came twice": case(*attempts(2, **OUTSIDE), attempts=9),
    "one that came three times, with a step between": case(
        *attempts(2, **OUTSIDE), failed(3, last_step=7, **OUTSIDE), attempts=9
    ),
    "one that came three times, with trials between": case(
        *(failed(n, progressed=True, **OUTSIDE) for n in (1, 2, 3)), attempts=9
    ),
    "three faults of the outside that differ": case(
        *attempts(2, **OUTSIDE), failed(3, fingerprint="k: other", **OUTSIDE), attempts=9
    ),
    "storage that did not answer once": case(failed(1, **STORAGE)),
    "storage that failed again after a new checkpoint": case(
        failed(1, **STORAGE), failed(2, progressed=True, **STORAGE)
    ),
    "another failure that waits, three times": case(*attempts(3, waits=True), attempts=9),
    "a loss that is no number may come of a bad batch": case(without_loss(1, 100)),
    "a loss that is no number later is another one": case(
        without_loss(1, 100), without_loss(2, 150)
    ),
    "a loss at the same step of a later epoch is another one": case(
        without_loss(1, 40, epoch=1), without_loss(2, 40, epoch=3)
    ),
    "a loss at an earlier step of a later epoch too": case(
        without_loss(1, 40, epoch=1), without_loss(2, 3, epoch=2)
    ),
    "where only the epoch is printed, a later one is another": case(
        without_loss(1, None, epoch=1), without_loss(2, None, epoch=3)
    ),
    "a passing failure is tried again": case(failed(1)),
    "an older checkpoint is tried, and not counted": case(
        *attempts(2), failed(3, "stop-user", falls_back=True)
    ),
    "the same failure is not the same where an attempt between went further": case(
        failed(1, lived_s=4.0), failed(2, first_step=100), failed(3, lived_s=4.0)
    ),
    "a full disk that has room again is tried": case(failed(1, "stop-hardware", has_room=True)),
    "two attempts are not yet the bound": case(*attempts(2)),
    "progress renews the budget": case(*(failed(n, first_step=100 * n) for n in range(1, 9))),
    "one step is progress": case(*attempts(2), failed(3, first_step=1)),
    "replaced processes are not counted": case(
        *attempts(30, progressed=True, way=REPLACED, replaced_for="50 trials"), *attempts(2)
    ),
    "a replacement asks for no verdict": case(
        failed(1, "", progressed=True, way=REPLACED, replaced_for="50 trials")
    ),
    "counted work renews the budget": case(*attempts(9, progressed=True)),
    "after counted work the same age means nothing": case(
        *attempts(2, lived_s=40.0, progressed=True)
    ),
    "more than a tenth apart is another age": case(
        failed(1, lived_s=1000.0), failed(2, lived_s=890.0)
    ),
    "after another step it is another age": case(
        failed(1, lived_s=31.0, last_step=2), failed(2, lived_s=2.0, last_step=1)
    ),
    "a job that seldom reports its step may have come further": case(
        failed(1, lived_s=300.0, last_step=1000), failed(2, lived_s=361.0, last_step=1000)
    ),
    "another failure at the same age may pass": case(
        failed(1, lived_s=9.0, fingerprint="other"), failed(2, lived_s=9.0)
    ),
    "the same failure of another rank may pass": case(
        failed(1, lived_s=100.0, root_rank=1), failed(2, lived_s=100.0, root_rank=0)
    ),
    "after progress the same age is another place": case(
        failed(1, lived_s=3600.0), failed(2, lived_s=3600.0, first_step=50)
    ),
    "under other settings it is another failure": case(
        failed(1, lived_s=9.0), failed(2, lived_s=9.0, mitigations=("autotune-off",))
    ),
    "a failure that passes with time may occur at the same age": case(
        *attempts(2, lived_s=61.0, waits=True)
    ),
    "the unknown after a long life is tried once": case(
        failed(1, "unknown", lived_s=600.0), unknown_after_s=600.0
    ),
    "an attempt may start up to the deadline": case(failed(1), deadline_s=1000.0),
    "a failure with a mitigation gets it": case(failed(1, "mitigate", offered=("a", "b"))),
    "without a mitigation that fits, time may do": case(
        failed(1, "mitigate", offered=("a",), mitigations=("a",), waits=True)
    ),
}
STOPPED = {
    "a fault of the outside three times without a step between": case(
        failed(1, last_step=500, **OUTSIDE), *(failed(n, **OUTSIDE) for n in (2, 3)), attempts=9
    ),
    "storage that did not answer twice": case(*attempts(2, last_step=9, **STORAGE)),
    "such a loss at the same step comes again": case(without_loss(1, 100), without_loss(2, 115)),
    "a loss at the same step of the same epoch comes again": case(
        without_loss(1, 40, epoch=3), without_loss(2, 40, epoch=3)
    ),
    "a loss at a later step of an earlier epoch too": case(
        without_loss(1, 40, epoch=3), without_loss(2, 90, epoch=2)
    ),
    "a loss that never was a number is in the weights": case(
        without_loss(1, 100), without_loss(2, 150, good="")
    ),
    "a loss without a step is tried once": case(without_loss(1, None), without_loss(2, None)),
    "a user's mistake is never tried again": case(failed(1, "stop-user")),
    "broken hardware is never tried again": case(failed(1, "stop-hardware")),
    "a preemption is the scheduler's to restart": case(failed(1, way=ASKED)),
    "nothing starts beside what cannot be killed": case(failed(1, unkillable=True)),
    "older checkpoints end with all attempts": case(
        *(failed(n, "stop-user", falls_back=True) for n in range(1, 11))
    ),
    "the same failure comes again before any progress": case(
        failed(1, first_step=100), *(failed(n, lived_s=4.0) for n in (2, 3))
    ),
    "a full disk is not tried where the same came again": case(
        *(failed(n, "stop-hardware", has_room=True, lived_s=9.0) for n in (1, 2))
    ),
    "attempts are bounded": case(*attempts(3)),
    "all attempts together are bounded": case(
        *(failed(n, first_step=100 * n) for n in range(1, 11))
    ),
    "a step reached without resuming is no progress": case(*attempts(3, first_step=0)),
    "resuming from the same step again is no progress": case(
        failed(1), *(failed(n, first_step=50) for n in range(2, 5))
    ),
    "replaced processes start a new budget, no more": case(
        *attempts(2),
        *attempts(1, progressed=True, way=REPLACED, replaced_for="50 trials"),
        *attempts(3),
    ),
    "a replacement may come too late": case(
        failed(1, "", progressed=True, way=REPLACED, replaced_for="50 trials"), deadline_s=900.0
    ),
    "the same failure twice after counted work would come again": case(
        failed(1, progressed=True), *(failed(n, lived_s=4.0) for n in (2, 3)), attempts=9
    ),
    "the same failure at the same age would come again": case(*attempts(2, lived_s=40.0)),
    "five seconds apart is the same age": case(failed(1, lived_s=2.0), failed(2, lived_s=7.0)),
    "a tenth apart is the same age": case(failed(1, lived_s=1000.0), failed(2, lived_s=910.0)),
    "after the same step a start that took longer is the same age": case(
        failed(1, lived_s=31.0, last_step=2), failed(2, lived_s=2.0, last_step=2)
    ),
    "a failure of a rank that is not known may be the same": case(
        failed(1, lived_s=100.0, root_rank=1), failed(2, lived_s=100.0)
    ),
    "from the same step at the same age it would come again": case(
        *attempts(2, lived_s=3600.0, first_step=50)
    ),
    "one that passes with time is bounded all the same": case(
        *attempts(3, lived_s=61.0, waits=True)
    ),
    "the unknown is not tried again": case(failed(1, "unknown")),
    "the unknown after a short life is not": case(
        failed(1, "unknown", lived_s=500.0), unknown_after_s=600.0
    ),
    "the unknown that came before is not": case(
        failed(1, "unknown", lived_s=700.0),
        failed(2, "unknown", lived_s=9000.0),
        unknown_after_s=600.0,
    ),
    "no attempt starts after the deadline": case(failed(1), deadline_s=900.0),
    "a wait may not lead beyond the deadline": case(*attempts(2), deadline_s=2004.0),
    "one attempt is one attempt": case(failed(1), attempts=1),
    "mitigations can be switched off": case(failed(1, "mitigate", offered=("a",)), enabled=False),
    "a mitigation that was tried is not tried again": case(
        failed(1, "mitigate", offered=("a",), mitigations=("a",))
    ),
    "a mitigation that the user rules out is not used": case(
        failed(1, "mitigate", offered=("a",)), never=("a",)
    ),
    "without a mitigation there is nothing to change": case(failed(1, "mitigate")),
}


# What people read of it, as a table: the case, its reason.
REASONS = {
    "a fault of the outside three times without a step between": (
        "the same without a step between 3 times: somebody has to look at it"
    ),
    "storage that did not answer twice": (
        "its storage failed so 2 times: somebody has to look at it"
    ),
    "such a loss at the same step comes again": "the loss is not a number at the same step again",
    "a user's mistake is never tried again": "the same command would fail again",
    "a passing failure is tried again": "it may be temporary",
    "a preemption is the scheduler's to restart": "it was asked to end",
    "nothing starts beside what cannot be killed": "one of its processes could not be killed",
    "an older checkpoint is tried, and not counted": "from the checkpoint before",
    "a full disk that has room again is tried": "a full disk can be freed",
    "attempts are bounded": "no attempts without progress are left (retry.attempts: 3)",
    "older checkpoints end with all attempts": "no attempts are left (retry.attempts_total: 10)",
    "a replacement asks for no verdict": "50 trials",
    "the same failure at the same age would come again": (
        "the same failure after the same time: it would happen again"
    ),
    "the unknown is not tried again": (
        "nothing is known about it (retry.unknown_after_s is not set)"
    ),
    "the unknown after a short life is not": "it is not known, and occurred within 10 min",
    "the unknown that came before is not": "it is not known, and occurred before",
    "the unknown after a long life is tried once": "it is not known, but occurred late",
    "no attempt starts after the deadline": (
        "the next attempt would start after the deadline (retry.deadline_s: 900)"
    ),
    "a failure with a mitigation gets it": "with a",
    "mitigations can be switched off": "mitigations are switched off (mitigate.enabled)",
    "a mitigation that was tried is not tried again": "its mitigations did not help",
    "a mitigation that the user rules out is not used": "no mitigation of it can be used here",
    "without a mitigation that fits, time may do": "it may be temporary",
}


def test_the_reason_is_one_clause_for_people():
    cases = TRIED_AGAIN | STOPPED
    assert {name: decide(*cases[name]).reason for name in REASONS} == REASONS


def test_success_is_the_end():
    assert decide([failed(1, exit_code=0)], POLICY) == Decision(DONE, "")


@pytest.mark.parametrize(("cases", "action"), [(TRIED_AGAIN, AGAIN), (STOPPED, STOP)])
def test_decision(cases, action):
    def check(history, policy):
        decision = decide(history, policy)
        assert decision.action == action
        assert decision.reason

    check_cases(cases, check)


def test_the_cheapest_mitigation_comes_first_and_is_kept_when_the_next_one_joins_it():
    first = failed(1, "mitigate", offered=("a", "b"))
    assert decide([first], POLICY).add == "a"
    second = failed(2, "mitigate", offered=("a", "b"), mitigations=("a",), lived_s=first.lived_s)
    assert decide([first, second], POLICY).add == "b"


def test_a_mitigation_that_cannot_be_used_beside_the_others_is_passed_over():
    last = failed(1, "mitigate", offered=("a", "b"), mitigations=("x",))
    usable = {("a", ("x",)): False, ("b", ("x",)): True}
    verdict = decide([last], POLICY, usable=lambda name, beside: usable[name, beside])
    assert verdict.add == "b"


def test_a_mitigation_does_not_wait_and_the_first_retry_neither():
    waiting = failed(1, "mitigate", offered=("a",), waits=True)
    assert decide([waiting], POLICY).delay_s == 0
    assert decide([failed(1)], POLICY).delay_s == 0


def test_a_death_of_our_keeper_is_tried_again_once_beyond_the_attempts():
    ours = failed(3, kind="keeper-killed")
    before = [failed(1, kind="a", fingerprint="a"), failed(2, kind="b", fingerprint="b")]
    three = allowing(attempts=3, attempts_total=20)
    assert decide([*before, ours], three) == Decision(
        AGAIN, "the failure is saferun's own", 0.0, ""
    )
    assert decide([*before, ours, ours._replace(number=4)], three).action == STOP
    assert decide([before[0], ours], allowing(attempts=2)).action == AGAIN
    assert decide([ours], allowing(attempts=1)).action == STOP
    assert decide([*before, ours], allowing(attempts=3, attempts_total=3)).action == STOP


@pytest.mark.parametrize(
    ("waits", "count", "whole"),
    [(False, 2, 5.0), (True, 1, 5.0), (True, 2, 10.0), (True, 5, 60.0), (False, 60, 60.0)],
)
def test_waits_double_up_to_the_longest(waits, count, whole):
    many = allowing(attempts=100, attempts_total=100)
    history = attempts(count, waits=waits)
    assert decide(history, many).delay_s == whole
    assert decide(history, many, jitter=1.0).delay_s == whole / 2


@pytest.mark.parametrize("verdict", ["unknown", "stop-user"])
def test_the_last_attempt_may_be_one_that_tells_the_reason_and_only_one(verdict):
    last = failed(1, verdict, offered=() if verdict == "unknown" else (DEBUG,))
    wanted = allowing(debug_last=True)
    once_more = "once more, to learn the reason (retry.debug_last)"
    assert decide([last], wanted) == Decision(AGAIN, once_more, 0.0, DEBUG)
    assert decide([last], POLICY).action == STOP
    again = failed(2, verdict, offered=last.offered, mitigations=(DEBUG,))
    assert decide([last, again], wanted).action == STOP


def test_a_known_mistake_is_not_tried_again_to_learn_its_reason():
    assert decide([failed(1, "stop-user")], allowing(debug_last=True)).action == STOP


VERDICTS = st.sampled_from(["retry", "mitigate", "stop-user", "stop-hardware", "unknown"])


@given(
    st.lists(
        st.tuples(VERDICTS, st.floats(0, 1e5), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=40,
    ),
    st.floats(0, 1),
)
def test_no_run_goes_on_for_ever(story, jitter):
    """attempts_total ends every run, stop verdicts end it, and mitigations never repeat."""
    wanted = allowing(debug_last=True, unknown_after_s=1.0)
    history: list[AttemptOutcome] = []
    in_force: tuple[str, ...] = ()
    for number, (verdict, lived_s, step, waits) in enumerate(story, 1):
        one = failed(
            number,
            verdict,
            lived_s=lived_s,
            offered=("a", "b"),
            first_step=step,
            waits=waits,
            mitigations=in_force,
        )
        history.append(one)
        decision = decide(history, wanted, jitter=jitter)
        assert used_up(history) >= 1
        if verdict == "stop-hardware":
            assert decision.add in ("", DEBUG)
        if decision.action != AGAIN:
            return
        assert number < wanted.retry.attempts_total
        assert 0 <= decision.delay_s <= 60
        assert decision.add not in in_force
        in_force += (decision.add,) if decision.add else ()


def test_after_a_device_side_assert_the_last_attempt_has_the_guards():
    last = failed(1, "stop-user", kind="device-side-assert")
    decision = decide([last], allowing(debug_last=True))
    assert (decision.add, "not compiled" in decision.reason) == (GUARDS, True)
    assert decide([last], allowing()).action == STOP
    again = failed(2, "stop-user", kind="device-side-assert", mitigations=(GUARDS,))
    assert decide([last, again], allowing(debug_last=True)).action == STOP


def test_what_is_left_is_bounded_in_a_row_and_in_all():
    policy = with_values(Settings(), {"retry.attempts": 3, "retry.attempts_total": 5}).retry
    assert left([], policy) == 2
    assert left([failed(1)], policy) == 1
    assert left([failed(number) for number in (1, 2, 3)], policy) == 0
    replaced = [failed(number, progressed=True, way=REPLACED) for number in (1, 2, 3, 4)]
    assert left(replaced, policy) == 2  # replaced ones use nothing of all
    progress = [failed(number, progressed=True) for number in (1, 2, 3)]
    assert left(progress, policy) == 1
    assert left([*progress, failed(4, progressed=True)], policy) == 0
