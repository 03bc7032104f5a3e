"""Pure: the attempts so far and the policies make one decision: again, with what change, or stop.

    decide(history, Policies(retry, mitigate), usable=…, jitter=…) -> Decision

reads no clock and no random numbers: both arrive as values. A failure that nothing was changed
against and that came twice at the same age is taken for deterministic; what waiting cures (a port
in TIME_WAIT, a service that is down, memory that drains) is the exception, since there the same
failure at the same age is what to expect, and the attempts bound it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.model import MitigationPolicy, RetryPolicy
from saferun.named_tuple import NamedTuple

SAME_AGE_SHARE = 0.1  # two attempts that lived as long as this share of the longer one, or
SAME_AGE_S = 5.0  # this many seconds, apart from each other failed at the same age
DEBUG = "debug-settings"  # the mitigation that only tells the reason

AGAIN, STOP, DONE = "again", "stop", "done"


class Try(NamedTuple):
    """One attempt that has ended, as far as the decision needs to know it."""

    number: int  # 1, 2, …
    exit_code: int  # of the launcher; 128+n for a signal
    lived_s: float  # seconds from the launcher's start to its end
    ended_s: float  # seconds from the start of the first attempt to the end of this one
    kind: str = "no-failure"
    verdict: str = ""  # retry, mitigate, stop-user, stop-hardware, unknown; "" after success
    offered: tuple[str, ...] = ()  # of the kind, cheapest first
    fingerprint: str = ""
    mitigations: tuple[str, ...] = ()  # in force
    waits: bool = False  # waiting is part of the mitigation
    asked: bool = False  # a signal asked it to end
    first_step: int | None = None  # the first training step seen in its output
    unkillable: bool = False  # the kernel could not end one of its processes


class Policies(NamedTuple):
    """What the profile allows."""

    retry: RetryPolicy
    mitigate: MitigationPolicy


class Decision(NamedTuple):
    """What happens now."""

    action: str  # "again", "stop", "done"
    reason: str  # one clause for people
    delay_s: float = 0.0  # before the next attempt
    add: str = ""  # the mitigation that the next attempt gets on top of those in force


def decide(
    history: Sequence[Try],
    policy: Policies,
    *,
    usable: Callable[[str, tuple[str, ...]], bool] = lambda name, beside: True,
    jitter: float = 0.0,
) -> Decision:
    """Return what happens after the last attempt of `history`.

    Args:
        history: all attempts of this run, oldest first; at least one.
        policy: what the profile allows.
        usable: tells whether a mitigation can be used beside the ones in force.
        jitter: 0 to 1; up to half of a wait is taken off, so that nodes do not come back at once.
    """
    last = history[-1]
    if last.exit_code == 0:
        return Decision(DONE, "")
    if last.asked:
        return Decision(STOP, "it was asked to end")
    if last.unkillable:
        return Decision(STOP, "a process of it could not be killed")
    wish = _wish(history, policy, usable)
    if wish.action == STOP:
        return _debug(history, policy, wish)
    delay = _delay(history, policy, jitter) if not wish.add else 0.0
    return _bounded(history, policy, wish._replace(delay_s=delay))


def _wish(
    history: Sequence[Try], policy: Policies, usable: Callable[[str, tuple[str, ...]], bool]
) -> Decision:
    """What the kind of failure asks for, before any bound."""
    last = history[-1]
    if last.verdict == "mitigate":
        return _mitigation(last, policy, usable)
    if last.verdict == "retry":
        if not last.waits and _seen_before(history):
            return Decision(STOP, "the same failure at the same age: it would come again")
        return Decision(AGAIN, "it can pass")
    if last.verdict == "unknown":
        return _unknown(history, policy)
    return Decision(STOP, "the same command would fail again")


def _mitigation(
    last: Try, policy: Policies, usable: Callable[[str, tuple[str, ...]], bool]
) -> Decision:
    """The cheapest mitigation not yet in force; without one, a plain retry where that helps."""
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
        return Decision(AGAIN, f"with {left[0]}", add=left[0])
    if last.waits:
        return Decision(AGAIN, "it can pass")
    tried = [name for name in last.offered if name in last.mitigations]
    return Decision(
        STOP, "its mitigations did not help" if tried else "no mitigation of it can be used here"
    )


def _unknown(history: Sequence[Try], policy: Policies) -> Decision:
    """Once, after a long life, and only if it never came before."""
    last, least_s = history[-1], policy.retry.unknown_after_s
    if least_s is None:
        return Decision(STOP, "nothing is known about it (retry.unknown_after_s is not set)")
    if last.lived_s < least_s:
        return Decision(STOP, f"it is not known, and came within {least_s:g} s")
    if any(earlier.fingerprint == last.fingerprint for earlier in history[:-1]):
        return Decision(STOP, "it is not known, and came before")
    return Decision(AGAIN, "it is not known, but came late")


def _seen_before(history: Sequence[Try]) -> bool:
    """Whether an earlier attempt failed so at the same age, from the same start and settings."""
    last = history[-1]
    return any(
        earlier.fingerprint == last.fingerprint
        and earlier.mitigations == last.mitigations
        and earlier.first_step == last.first_step
        and same_age(earlier.lived_s, last.lived_s)
        for earlier in history[:-1]
    )


def same_age(one_s: float, other_s: float) -> bool:
    """Return whether two attempts lived equally long: ±10 % or 5 s.

    >>> same_age(3.0, 7.9), same_age(3600.0, 3900.0), same_age(3600.0, 4100.0)
    (True, True, False)
    """
    apart = abs(one_s - other_s)
    return apart <= max(SAME_AGE_S, SAME_AGE_SHARE * max(one_s, other_s))


def _debug(history: Sequence[Try], policy: Policies, decision: Decision) -> Decision:
    """One more attempt that tells the reason, where it is wanted and could tell something new."""
    last = history[-1]
    wanted = policy.retry.debug_last and (last.verdict == "unknown" or DEBUG in last.offered)
    if not wanted or DEBUG in policy.mitigate.never or any(DEBUG in t.mitigations for t in history):
        return decision
    again = Decision(AGAIN, "once more, to learn the reason (retry.debug_last)", add=DEBUG)
    return _bounded(history, policy, again)


def _bounded(history: Sequence[Try], policy: Policies, decision: Decision) -> Decision:
    """Stop where the attempts or the time are used up."""
    last = history[-1]
    if len(history) >= policy.retry.attempts_total:
        return Decision(STOP, f"{len(history)} attempts are all there are (retry.attempts_total)")
    if (used := used_up(history)) >= policy.retry.attempts:
        many = "attempt without progress is" if used == 1 else "attempts without progress are"
        return Decision(STOP, f"{used} {many} all there are (retry.attempts)")
    if (
        policy.retry.deadline_s is not None
        and last.ended_s + decision.delay_s > policy.retry.deadline_s
    ):
        return Decision(STOP, f"the time is over (retry.deadline_s: {policy.retry.deadline_s:g})")
    return decision


def used_up(history: Sequence[Try]) -> int:
    """Return how many attempts of the budget are used: one that got further starts a new budget.

    Progress is a *first* step beyond those of all earlier attempts: it was resumed from there.
    """
    since, furthest = 0, 0
    for place, one in enumerate(history):
        if one.first_step is not None and one.first_step > furthest:
            furthest = one.first_step
            since = place if place else since
    return len(history) - since


def _delay(history: Sequence[Try], policy: Policies, jitter: float) -> float:
    """Seconds to wait: doubled with each retry; the first only where waiting is the mitigation."""
    last = history[-1]
    retries = used_up(history) - (0 if last.waits else 1)
    if retries <= 0:
        return 0.0
    first, longest = policy.retry.backoff_s
    whole = min(longest, first * 2.0 ** min(retries - 1, 30))
    return float(whole * (1.0 - min(max(jitter, 0.0), 1.0) / 2.0))
