"""Pure: everything that the evidence of a failure may mean, each with its weight.

An explanation comes from a sign that fits a place of the log, from an exception that no sign knows,
or from a process's exit code or signal. root_cause.py chooses among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from saferun.diagnosis import exit_codes, matches, oom_message, progress, signatures, tracebacks
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.log_reader import Line
from saferun.diagnosis.matches import Match
from saferun.diagnosis.signatures import USER, WEIGHTS, Knowledge
from saferun.diagnosis.tracebacks import Raised
from saferun.named_tuple import NamedTuple

# After so many lines without another explanation the job had survived what stands before them.
_GAP_LINES = 400
_LONG_GAP_LINES = 3000
_SURVIVED, _SURVIVED_LONG = 40, 5  # the most that such an explanation weighs
_NO_LIMIT = 1000  # above every weight
_BRIEF_LINES = 80  # in so short a log, a phrase outside an exception can be a reason to retry
# Exceptions that only pass on what another process or exception reported.
_WRAPPERS = frozenset(
    ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError",
     "RayTaskError", "SystemExit", "RayActorError", "ActorDiedError", "SignalException",
     "WorkerCrashedError", "SubprocessError", "EngineDeadError", "ProcessException",
     "ActorUnavailableError", "OwnerDiedError", "LocalRayletDiedError")
)  # fmt: skip
_ENDED_ELSEWHERE = re.compile(
    r"\A.{0,400}terminated with (?:signal|exit code)|-- Process \d{1,5} terminated|"
    r"died with <Signals|-- Tracebacks above this line|"
    r"[Ss]ee (?:the )?(?:root cause above|stack trace for root cause)"
)
_PASSED_ON = re.compile(r"Caught \w{1,80} in (?:DataLoader worker|replica|pin memory)")
# Exceptions that programs use for control flow: one raised while handling them explains more.
_CONTROL_FLOW = frozenset(
    ("KeyError", "AttributeError", "StopIteration", "Empty", "IndexError", "ImportError",
     "ModuleNotFoundError", "TypeError", "StopAsyncIteration", "LookupError")
)  # fmt: skip
_BARRIER = re.compile(r"world_size=(\d{1,6}), worker_count=(\d{1,6})")
_CRASHES = (  # kinds that the signal of a crash alone stands for
    *("abort-unknown", "dataloader-shm-full", "illegal-instruction"),
    *("segfault", "segfault-environment"),
)


class Explanation(NamedTuple):
    """One explanation of a failure."""

    kind: str
    weight: float
    at: int  # index of its line; -1 where it comes from an exit code alone
    rank: int | None
    text: str
    raised: Raised | None = None
    generic: bool = False  # nothing is known but the exception


def collect(
    evidence: Evidence, lines: Sequence[Line], knowledge: Knowledge
) -> tuple[list[Explanation], exit_codes.Exits]:
    """Return every explanation of a failure, and how processes ended.

    Args:
        evidence: of the attempt.
        lines: its error files' tracebacks, then its log.
        knowledge: how failures look.
    """
    exceptions = tracebacks.find(lines)
    exits = exit_codes.find(lines, exceptions.framed)
    fitting = matches.match(knowledge, lines, exceptions.raised, exceptions.framed)
    brief = evidence.log.line_count <= _BRIEF_LINES
    found = [
        Explanation(_by_circumstance(m, evidence, lines), m.weight, m.at, m.rank, m.text, m.raised)
        for m in fitting
        if brief or m.weight != WEIGHTS["bare"] or knowledge.kinds[m.kind].stops
    ]
    explained = {m.raised.at for m in fitting if m.raised}
    found += _of_unknown_exceptions(exceptions.raised, explained, knowledge, lines)
    found = _with_survived_weights(found, lines)
    return [*found, *_of_exits(evidence, exits, lines)], exits


def _of_exits(
    evidence: Evidence, exits: exit_codes.Exits, lines: Sequence[Line]
) -> Iterator[Explanation]:
    """Yield what exit codes and signals mean: of the log, of the error files, of the launcher."""
    for sign in exits.signs:
        text = " ".join(line.text for line in lines[sign.at : sign.at + 2])
        kind = _by_machine(sign.kind, evidence)
        yield Explanation(kind, sign.weight, sign.at, sign.rank, text)
    for failure in evidence.failures:
        if failure.exit_code is not None and (known := exit_codes.kind_of(failure.exit_code)):
            kind, weight = known
            yield Explanation(_by_machine(kind, evidence), weight, -1, failure.rank, "")
    # torchrun returns 1 whatever happened
    if evidence.exit_code not in (None, 1) and (known := exit_codes.kind_of(evidence.exit_code)):
        kind, weight = known
        yield Explanation(_by_machine(kind, evidence), weight - 2, -1, None, "")


def _of_unknown_exceptions(
    raised: Iterable[Raised], explained: set[int], knowledge: Knowledge, lines: Sequence[Line]
) -> Iterator[Explanation]:
    """Yield one explanation for each chain of exceptions that no sign fits.

    Args:
        raised: all exceptions of the log.
        explained: the lines of those that a sign fits.
        knowledge: what a class or a phrase of an exception means.
        lines: the log's.
    """
    chains: dict[int, list[Raised]] = {}
    for item in raised:
        chains.setdefault(item.chain, []).append(item)
    for chain in chains.values():
        if any(item.at in explained for item in chain) or not (chain[0].type or chain[0].headed):
            continue
        root = _root_of_chain(chain)
        kind, weight = _by_class(root, knowledge)
        if root.background or matches.goes_on(root, lines):
            weight = WEIGHTS["hint"]
        yield Explanation(kind, weight, root.at, root.rank, root.text, root, True)


def _root_of_chain(chain: Sequence[Raised]) -> Raised:
    """Return the exception to blame: the first one, unless it was only control flow."""
    real = [item for item in chain if not _is_wrapper(item)] or list(chain)
    for item, following in zip(real, [*real[1:], None], strict=True):
        if following is None or following.link != "context" or item.name not in _CONTROL_FLOW:
            return item
    return real[-1]


def _is_wrapper(item: Raised) -> bool:
    return item.name in _WRAPPERS or _ENDED_ELSEWHERE.search(item.text) is not None


def _by_class(item: Raised, knowledge: Knowledge) -> tuple[str, int]:
    """Return kind and weight of an exception by its class, else by a phrase of its message."""
    if not item.type:
        return "unknown", WEIGHTS["hint"]
    if _is_wrapper(item):
        return "child-failed-no-root", WEIGHTS["hint"] + 3
    if item.type == "Error" and not item.headed:  # of any program that writes to the log
        return "user-exception", WEIGHTS["bare"]
    weight = USER if not _PASSED_ON.search(item.text) else USER - 1
    kind = knowledge.classes.get(item.name)
    if kind == "interrupted":
        return kind, WEIGHTS["process"] + 3
    if kind is None:
        text = item.text.lower()
        kind = next((k for needle, k in knowledge.phrases if signatures.says(needle, text)), None)
    return kind or "user-exception", weight


def _with_survived_weights(
    found: Sequence[Explanation], lines: Sequence[Line]
) -> list[Explanation]:
    """Take weight from what the job survived: many lines follow before the next explanation."""
    weighed: list[Explanation] = []
    limit, later = _NO_LIMIT, len(lines) and lines[-1].number
    for item in sorted(found, key=lambda f: f.at, reverse=True):
        number = lines[item.at].number if item.at >= 0 else 0
        if later - number > _GAP_LINES and number:
            far = later - number > _LONG_GAP_LINES
            limit = min(limit, _SURVIVED_LONG if far else _SURVIVED)
        later = number or later
        weighed.append(item._replace(weight=min(item.weight, limit)))
    return weighed


def _by_circumstance(match: Match, evidence: Evidence, lines: Sequence[Line]) -> str:
    """Return the kind of a match, where numbers or the job's age decide between look-alikes."""
    if match.kind == "cuda-oom":
        return oom_message.kind(oom_message.read(match.text))
    if match.kind == "rendezvous-connect-failed" and (counts := _BARRIER.search(match.text)):
        return "stale-rendezvous-store" if int(counts[2]) > int(counts[1]) else match.kind
    if match.kind == "cuda-illegal-access" and _ran_long(evidence, lines[: match.at]):
        return "cuda-illegal-access-sporadic"
    if "killed by signal" in match.text:  # a DataLoader worker: torch knows only the number
        kind = _by_machine(match.kind, evidence)
        if kind == "dataloader-worker-died" and evidence.oom_kills == 0:
            return "ended-by-signal"  # memory was not short: it need not come again
        return kind
    return match.kind


def _ran_long(evidence: Evidence, before: Sequence[Line]) -> bool:
    """Return whether the job had made long, healthy progress."""
    if progress.diverged(before):
        return False
    if (evidence.age_s or 0.0) >= progress.LONG_S or (evidence.step or 0) >= progress.LONG_STEPS:
        return True
    return progress.is_long(before)


def _by_machine(kind: str, evidence: Evidence) -> str:
    """Return the kind that a signal's usual kind becomes by what was measured on the machine."""
    if evidence.finished and kind in _CRASHES:
        return "crash-after-the-end"
    if kind == "host-oom-killed" and evidence.oom_kills == 0:
        return "killed-from-outside"
    if kind == "dataloader-shm-full" and evidence.shm_ample:
        return "bus-error"
    return kind
