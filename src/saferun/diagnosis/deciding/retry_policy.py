"""Pure: decide from the attempts so far and the policies: retry, retry with a mitigation, or stop.

    decide(history, settings, usable=…, jitter=…) -> Decision

`decide` reads no clock and no random numbers; both are passed as values. A failure that occurs
twice at the same age with the same mitigations counts as deterministic and is not retried. Failures
that pass with time (a port in TIME_WAIT, a service that is down, memory that is being freed) are
the exception: they are expected again at the same age, so only the number of attempts limits their
retries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.base.durations import seconds
from saferun.diagnosis.attempt_outcome import ASKED, REPLACED, AttemptOutcome, Decision
from saferun.settings import RetryPolicy, Settings

# Two attempts failed at the same age if their durations differ by at most this share of the longer
# one, or by at most this many seconds.
SAME_AGE_SHARE = 0.1
SAME_AGE_S = 5.0
# This larger tolerance applies to two attempts with the same last step. An attempt's duration
# includes the start of torchrun, which takes 1 s with a warm agent and up to a minute from a cold
# disk or on a busy machine.
SAME_STEP_S = 60.0
SAME_LOSS_STEPS = 20  # steps between losses that stop being numbers; sums differ a little
DEBUG = "debug-settings"  # a mitigation that only collects diagnostics
GUARDS = "debug-guards"  # the same for an index out of range on a GPU
OURS = "keeper-killed"  # a failure of saferun itself
_ASSERT = "device-side-assert"  # the kind of such an index

# How often one fault of the world outside the job may come without a step between. Storage that
# does not answer twice (EIO, ESTALE, EBUSY) needs somebody.
_OUTSIDE, _TIMES, _TIMES_OF_STORAGE = "io-network", 3, 2
_STORAGE = "stale-file-handle"

AGAIN, STOP, DONE = "again", "stop", "done"


def decide(
    history: Sequence[AttemptOutcome],
    policy: Settings,
    *,
    usable: Callable[[str, tuple[str, ...]], bool] = lambda name, beside: True,
    jitter: float = 0.0,
) -> Decision:
    """Return what to do after the last attempt of `history`.

    Args:
        history: all attempts of this run, oldest first; at least one.
        policy: the profile's settings.
        usable: function that returns whether a mitigation can be used with those in force.
        jitter: 0 to 1; shortens a wait by up to half, so that nodes do not restart all at once.

    Returns:
        The action with its reason, the delay in seconds and the mitigation to add.
    """
    last = history[-1]
    if last.exit_code == 0:
        return Decision(DONE, "")
    if last.way == ASKED:
        return Decision(STOP, "it was asked to end")
    if last.unkillable:
        return Decision(STOP, "one of its processes could not be killed")
    if last.way == REPLACED:
        return _in_time(last, policy, Decision(AGAIN, last.replaced_for))
    if last.falls_back:
        return _bounded(history, policy, Decision(AGAIN, "from the checkpoint before"))
    if last.has_room and not _seen_before(history):
        return _bounded(history, policy, Decision(AGAIN, "a full disk can be freed"))
    if _is_ours_once(history) and policy.retry.attempts > 1:
        return _in_total(history, policy, Decision(AGAIN, "the failure is saferun's own"))
    decision = _by_verdict(history, policy, usable)
    if decision.action == STOP:
        return _debug(history, policy, decision)
    delay = _delay(history, policy, jitter) if not decision.add else 0.0
    return _bounded(history, policy, decision._replace(delay_s=delay))


def _by_verdict(
    history: Sequence[AttemptOutcome],
    policy: Settings,
    usable: Callable[[str, tuple[str, ...]], bool],
) -> Decision:
    """Return the decision by the last attempt's verdict, before any limit is applied."""
    last = history[-1]
    if last.diagnosis.verdict == "mitigate":
        return _mitigation(last, policy, usable)
    if last.diagnosis.verdict == "retry":
        if _loss_comes_again(history):
            return Decision(STOP, "the loss is not a number at the same step again")
        if why := _stays(history):
            return Decision(STOP, why)
        if not last.waits and _seen_before(history):
            return Decision(STOP, "the same failure after the same time: it would happen again")
        return Decision(AGAIN, "it may be temporary")
    if last.diagnosis.verdict == "unknown":
        return _unknown(history, policy)
    return Decision(STOP, "the same command would fail again")


def _mitigation(
    last: AttemptOutcome, policy: Settings, usable: Callable[[str, tuple[str, ...]], bool]
) -> Decision:
    """Choose the cheapest mitigation not yet in force; if there is none, retry if waiting helps."""
    if not policy.mitigate.enabled:
        return Decision(STOP, "mitigations are switched off (mitigate.enabled)")
    left = [
        name
        for name in last.offered
        if name not in last.mitigations
        and name not in policy.mitigate.never
        and usable(name, last.mitigations)
    ]
    if left:
        return Decision(AGAIN, f"with {left[0]}", add=left[0], untried=tuple(left[1:]))
    if last.waits:
        return Decision(AGAIN, "it may be temporary")
    tried = [name for name in last.offered if name in last.mitigations]
    return Decision(
        STOP, "its mitigations did not help" if tried else "no mitigation of it can be used here"
    )


def _unknown(history: Sequence[AttemptOutcome], policy: Settings) -> Decision:
    """Retry an unrecognised failure once, if the attempt ran long and the failure is new."""
    last, least_s = history[-1], policy.retry.unknown_after_s
    if least_s is None:
        return Decision(STOP, "nothing is known about it (retry.unknown_after_s is not set)")
    if last.lived_s < least_s:
        return Decision(STOP, f"it is not known, and occurred within {seconds(least_s)}")
    if any(earlier.fingerprint == last.fingerprint for earlier in history[:-1]):
        return Decision(STOP, "it is not known, and occurred before")
    return Decision(AGAIN, "it is not known, but occurred late")


def _is_ours_once(history: Sequence[AttemptOutcome]) -> bool:
    """Return whether the last attempt, and no earlier one, failed with our keeper."""
    return history[-1].kind == OURS and all(one.kind != OURS for one in history[:-1])


def _seen_before(history: Sequence[AttemptOutcome]) -> bool:
    """Return whether an earlier attempt with the same settings and start failed so at this age.

    If a later attempt made progress, the failure does not come every time. On another rank it is a
    different failure: machines kill processes at any time.
    """
    last = history[-1]
    begun = max((place + 1 for place, one in enumerate(history) if one.progressed), default=0)
    begun = max(begun, _furthest(history))
    return any(
        earlier.fingerprint == last.fingerprint
        and earlier.mitigations == last.mitigations
        and earlier.first_step == last.first_step
        and (earlier.root_rank == last.root_rank or None in (earlier.root_rank, last.root_rank))
        and _is_same_age(earlier, last)
        for earlier in history[begun:-1]
    )


def _stays(history: Sequence[AttemptOutcome]) -> str:
    """Return why the last fault of the world outside does not pass; "" if it may.

    It came so often without a step or a trial between. An attempt that made some may begin such a
    row, since its fault came after them. For storage that does not answer only a new checkpoint
    counts, which it had to hold.
    """
    last, times = history[-1], 1
    storage = last.kind == _STORAGE
    for one, after in zip(history[-2::-1], history[:0:-1], strict=True):
        between = after.progressed or (not storage and after.last_step is not None)
        if between or one.fingerprint != last.fingerprint:
            break
        times += 1
    if last.diagnosis.group != _OUTSIDE or times < (_TIMES_OF_STORAGE if storage else _TIMES):
        return ""
    what = "its storage failed so" if storage else "the same without a step between"
    return f"{what} {times} times: somebody has to look at it"


def _loss_comes_again(history: Sequence[AttemptOutcome]) -> bool:
    """Return whether an attempt was ended for its loss as an earlier one, and came no further."""
    last = history[-1].no_number
    before = [one.no_number for one in history[:-1] if one.no_number]
    if last is None or not before:
        return False
    if not last.good:
        return True
    earlier = before[-1]
    if last.epoch is not None and earlier.epoch is not None and last.epoch != earlier.epoch:
        return last.epoch < earlier.epoch
    if last.step is None or earlier.step is None:
        return True
    return last.step <= earlier.step + SAME_LOSS_STEPS


def _is_same_age(one: AttemptOutcome, other: AttemptOutcome) -> bool:
    if one.last_step is not None and one.last_step == other.last_step:
        return same_age(one.lived_s, other.lived_s, SAME_STEP_S)
    return same_age(one.lived_s, other.lived_s)


def same_age(one_s: float, other_s: float, within_s: float = SAME_AGE_S) -> bool:
    """Return whether two durations are equal to within 10 % or `within_s`.

    Args:
        one_s: seconds.
        other_s: seconds.
        within_s: seconds by which they may differ in any case.

    >>> same_age(3.0, 7.9), same_age(3600.0, 3900.0), same_age(3600.0, 4100.0)
    (True, True, False)
    """
    apart = abs(one_s - other_s)
    return apart <= max(within_s, SAME_AGE_SHARE * max(one_s, other_s))


def _debug(history: Sequence[AttemptOutcome], policy: Settings, decision: Decision) -> Decision:
    """Return a last attempt for diagnostics if the policy wants one and none has run."""
    last = history[-1]
    unknown = last.diagnosis.verdict == "unknown" or DEBUG in last.offered
    name = GUARDS if last.kind == _ASSERT else DEBUG if unknown else ""
    done = any(other in t.mitigations for t in history for other in (GUARDS, DEBUG))
    if not (policy.retry.debug_last and name) or name in policy.mitigate.never or done:
        return decision
    how = ", not compiled and with guards" if name == GUARDS else ""
    again = Decision(AGAIN, f"once more{how}, to learn the reason (retry.debug_last)", add=name)
    return _bounded(history, policy, again)


def _bounded(history: Sequence[AttemptOutcome], policy: Settings, decision: Decision) -> Decision:
    """Return the decision, or a stop if the attempts or the time are used up."""
    if used_up(history) >= policy.retry.attempts:
        limit = f"retry.attempts: {policy.retry.attempts}"
        decision = Decision(STOP, f"no attempts without progress are left ({limit})")
    return _in_total(history, policy, decision)


def _in_total(history: Sequence[AttemptOutcome], policy: Settings, decision: Decision) -> Decision:
    """Return the decision, or a stop if the run's total attempts or time are used up."""
    if sum(one.way != REPLACED for one in history) >= policy.retry.attempts_total:
        limit = f"retry.attempts_total: {policy.retry.attempts_total}"
        return Decision(STOP, f"no attempts are left ({limit})")
    if decision.action == STOP:
        return decision
    return _in_time(history[-1], policy, decision)


def _in_time(last: AttemptOutcome, policy: Settings, decision: Decision) -> Decision:
    """Return the decision, or a stop if the next attempt would start too late."""
    if (
        policy.retry.deadline_s is not None
        and last.ended_s + decision.delay_s > policy.retry.deadline_s
    ):
        limit = f"retry.deadline_s: {policy.retry.deadline_s:g}"
        return Decision(STOP, f"the next attempt would start after the deadline ({limit})")
    return decision


def left(history: Sequence[AttemptOutcome], policy: RetryPolicy) -> int:
    """Return how many attempts can follow the next one if that makes no progress."""
    in_row = policy.attempts - used_up(history)
    in_total = policy.attempts_total - sum(one.way != REPLACED for one in history)
    return max(0, min(in_row, in_total) - 1)


def used_up(history: Sequence[AttemptOutcome]) -> int:
    """Return how many attempts of the budget are used; progress starts a new budget.

    An attempt made progress if the *first* step in its output is beyond the first steps of all
    earlier attempts (it resumed from a later checkpoint), or if it did work that counts. An attempt
    that could not load its checkpoint does not count if the previous checkpoint is tried next.
    """
    since = _furthest(history)
    for place, one in enumerate(history):
        if one.progressed:
            since = max(since, place + (one.way == REPLACED))
    return sum(not one.falls_back for one in history[since:])


def _furthest(history: Sequence[AttemptOutcome]) -> int:
    """Return the index of the last attempt that began further than all earlier ones; 0 if none."""
    since, furthest = 0, 0
    for place, one in enumerate(history):
        if one.first_step is not None and one.first_step > furthest:
            since, furthest = place, one.first_step
    return since


def _delay(history: Sequence[AttemptOutcome], policy: Settings, jitter: float) -> float:
    """Return the seconds to wait, doubled with each retry; the first waits only if `waits`."""
    last = history[-1]
    retries = used_up(history) - (0 if last.waits else 1)
    if retries <= 0:
        return 0.0
    first, longest = policy.retry.backoff_s
    whole = min(longest, first * 2.0 ** min(retries - 1, 30))
    return float(whole * (1.0 - jitter / 2.0))
