"""Pure: choose the root cause of a failure among several candidates.

It is the candidate with the highest weight, on the rank that failed first, at the earliest place.
The exceptions to that order are here: a rank that ended silently explains what its peers saw, and
an exception in the user's code comes before its consequences.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from saferun.diagnosis.deciding.candidate import Candidate
from saferun.diagnosis.deciding.exit_codes import AGENT_ASKED, Exits
from saferun.diagnosis.reading import progress
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.signatures import DECIDES, USER, WEIGHTS, Knowledge

_MESSAGE_LINES = 8  # longest message of an exception; later lines may be output
_SEPARATE_LINES = 3  # normal output between a handled exception and the one that ended the job
# Kinds by which a rank ends without a reason: what its peers then see is not the cause.
SILENT = ("child-failed-no-root", "user-args-error")
# The same for the echo `peer-lost`. Any other echo may itself lead to an abort, so an abort
# explains none of them.
_SIGNALLED = ("abort-unknown", "ended-by-signal", "interrupted", "sigterm-preempted")
_SILENT_TO_PEERS = (*SILENT, *_SIGNALLED)
# Kinds of torchrun's own end by a signal from outside.
_ASKED = ("sigterm-preempted", "sighup-terminal-closed", "interrupted")
_KILLED = ("killed-from-outside", "host-oom-killed")
_BROKEN = ("BrokenPipeError", "ConnectionResetError", "ConnectionAbortedError")
_GONE = (*_BROKEN, "EOFError")  # the last also of a file that ends too early
_SUMMARY = "ChildFailedError"  # torchrun's; the failures that it lists happened before it
_COMMUNICATION = ("collective", "rendezvous")  # groups of kinds
_NO_GPU = "cuda-not-available"
_OF_GPU = re.compile(r"(?i:\b(?:cuda|gpus?|nvidia)\b)")
_TO_GPU = re.compile(r"\.cuda\b|\bcuda\.|\.to\(|\bto_device\(|\bdevice\b")


@dataclass(frozen=True, slots=True)
class Step:
    """A candidate that seemed best, and the reason."""

    taken: Candidate
    why: str


def choose(
    found: Sequence[Candidate], exits: Exits, knowledge: Knowledge, lines: Sequence[Line]
) -> tuple[Step, ...]:
    """Return the steps to the root cause, which is the last one; () without a candidate.

    Args:
        found: all candidates (`candidates.collect`).
        exits: the ends of processes, and the rank that the launcher names as the first.
        knowledge: the kinds of failures.
        lines: the log's lines.
    """
    if not found:
        return ()
    root_rank = exits.root_rank

    def order(item: Candidate) -> tuple[float, bool, tuple[int, int]]:
        elsewhere = root_rank is not None and item.rank is not None and item.rank != root_rank
        return (-item.weight, elsewhere, item.position)

    best = min(found, key=order)
    steps = [Step(best, "it weighs most, on the rank that failed first, at the earliest place")]
    if best.weight >= DECIDES:
        return (Step(best, "it is known beside the log, which shows what followed"),)
    if best.weight <= WEIGHTS["echo+"] and _is_of_silent(exits.silent_rank, best, found):
        root_rank = exits.silent_rank
    if best.weight <= WEIGHTS["echo+"] and best.rank not in (None, root_rank):
        kinds = _SILENT_TO_PEERS if best.kind == "peer-lost" else SILENT
        silent = [item for item in found if item.kind in kinds and item.rank == root_rank]
        best = min(silent, key=order, default=best) if root_rank is not None else best
        steps.append(Step(best, "the rank that failed first ended without a reason; peers saw it"))
    if WEIGHTS["process"] < best.weight <= WEIGHTS["echo+"] and not _ended(best, root_rank):
        best = _reported_before(best, found) or best
        steps.append(Step(best, "the log reports it before the echo"))
    if best.weight < WEIGHTS["hard"]:
        own = _own_faults(best, found, lines, knowledge)
        best = min(own, key=order, default=best)
        steps.append(Step(best, "an exception of the script's own ended the job"))
    if best.generic and root_rank is None:
        best = _launchers_end(best, found) or best
        steps.append(Step(best, "the launcher was asked to end, or killed, before that exception"))
    elif best.generic and best.rank not in (None, root_rank):
        broken = best.raised is not None and best.raised.type in _BROKEN
        ends = (item for item in found if broken and item.rank == root_rank and not item.raised)
        best = min(ends, key=order, default=best)
        steps.append(Step(best, "that connection broke with the rank that failed first"))
    steps.append(Step(_standing(best, found) or best, "the other one is its consequence"))
    return tuple(
        step for at, step in enumerate(steps) if not at or step.taken is not steps[at - 1].taken
    )


def _is_of_silent(rank: int | None, echo: Candidate, found: Sequence[Candidate]) -> bool:
    """Return whether an echo follows from the end of a rank that chose to end.

    The launcher names the earliest exception, which may be a peer's that saw that rank go. If the
    rank itself may have printed an echo, it was not the first either.
    """
    told = {one.text for one in found if not one.in_log}
    others = (one for one in found if one.kind == echo.kind and one.in_log and one.raised)
    may_be_its = any(one.text not in told and one.rank in (None, rank) for one in others)
    return rank is not None and not may_be_its


def _standing(best: Candidate, found: Sequence[Candidate]) -> Candidate | None:
    """Return the lasting cause, printed as a warning, that led to `best`."""
    without = _is_without_gpu(best)
    return next(
        (
            item
            for item in found
            if item.at >= 0
            and (item.position < best.position or item.by == "exit code" or not best.in_log)
            and (best.kind in item.explains or (without and _NO_GPU in item.explains))
        ),
        None,
    )


def _is_without_gpu(item: Candidate) -> bool:
    """Return whether it is an exception of the script that concerns the GPU.

    If a traceback is cut before its exception, its last call decides.
    """
    if not item.generic or item.raised is None:
        return False
    if item.raised.type:
        return _OF_GPU.search(item.text) is not None
    last = item.raised.frames.rstrip().rsplit("\n", 1)[-1]
    return _TO_GPU.search(last) is not None


def _launchers_end(best: Candidate, found: Sequence[Candidate]) -> Candidate | None:
    """Return the launcher's own end by a signal if that led to an exception.

    It reports a signal before the exception and then ends the ranks; if a rank had failed by
    itself, it would name that one and report none. After a SIGKILL, a peer is gone.
    """
    asked = (i for i in found if i.kind in _ASKED and i.weight >= AGENT_ASKED and not i.raised)
    before = (i for i in asked if i.in_log and best.in_log and i.at < best.at)
    gone = best.raised is not None and best.raised.type in _GONE
    killed = (i for i in found if gone and i.line is None and i.kind in _KILLED)
    return min(before, key=lambda item: item.at, default=next(killed, None))


def _ended(item: Candidate, root_rank: int | None) -> bool:
    """Return whether it is the signal that ended the rank which failed first, so no echo."""
    kind = item.usual or item.kind  # whatever kind the circumstances give it
    return kind in _SIGNALLED and item.raised is None and item.rank == root_rank


def _reported_before(echo: Candidate, found: Sequence[Candidate]) -> Candidate | None:
    """Return the report that stands before an echo in the log and explains it.

    It is a launcher's report of a rank's end without a reason, or a reason without its exception.
    The peers saw the consequence. An exception in the line directly above only repeats the echo and
    does not count.
    """
    earlier = [item for item in found if item.at >= 0 and item.weight > WEIGHTS["hint"]]
    earlier = [i for i in earlier if i.raised is None or i.raised.name != _SUMMARY]
    if echo.raised:
        above = (echo.source.order, echo.at - 1)
        earlier = [
            i for i in earlier if i.raised is None or (i.source.order, i.raised.rows[-1]) != above
        ]
    first = min(earlier, key=lambda item: (item.position, -item.weight), default=echo)
    known = first.weight == WEIGHTS["bare"] and not first.generic
    return first if known or first.kind in SILENT else None


def _own_faults(
    best: Candidate, found: Sequence[Candidate], lines: Sequence[Line], knowledge: Knowledge
) -> list[Candidate]:
    """Return the exceptions of the user's code that ended the job instead of `best`."""
    kind = knowledge.kinds[best.kind]
    communication = kind.group in _COMMUNICATION and not kind.stops
    own = [
        item
        for item in found
        if _is_own_fault(item, best, after_only=kind.stops, before_communication=communication)
    ]
    return _not_survived(own, best, lines)


def _is_own_fault(
    item: Candidate, best: Candidate, *, after_only: bool, before_communication: bool
) -> bool:
    """Return whether an exception of the user's code, and not `best`, ended the job.

    An exception before `best`, on another chain, came first. One that follows at a distance means
    that the job survived `best`.

    Args:
        item: the candidate that may be such an exception.
        best: the candidate that seems best.
        after_only: only an exception after `best` counts.
        before_communication: `best` is a communication failure that may pass, so an exception with
            a traceback outweighs it at any distance.
    """
    if not item.generic or item.weight < USER - 1 or item.raised is None:
        return False
    together = item.source.order == best.source.order
    if together and best.raised is not None and best.raised.chain == item.raised.chain:
        return False
    if item.position < best.position:
        return not after_only
    if before_communication and item.raised.headed:
        return True
    if not together:  # an error file concerns the exception that ended its rank
        return False
    lines = best.source.lines
    end = min(best.raised.rows[-1], best.at + _MESSAGE_LINES) if best.raised else best.at
    if item.rank != best.rank:
        return False
    normal = (at for at in range(end + 1, item.at) if _is_normal(lines[at]))
    return next(itertools.islice(normal, _SEPARATE_LINES, None), None) is not None


def _not_survived(
    own: Sequence[Candidate], best: Candidate, lines: Sequence[Line]
) -> list[Candidate]:
    """Return the exceptions after which the job made no steps before a later failure, `best`.

    When a rank has failed, its peers make no steps: the next collective blocks them. (An echo, or a
    crash at exit, weighs less than an exception and is never `best` here. It would prove nothing,
    as a rank's stdout may be written when the rank ends.)
    """
    early = [item.at for item in own if item.in_log and item.position < best.position]
    if not early:
        return list(own)
    steps = progress.steps(lines, min(early), best.at)
    return [
        item
        for item in own
        if not item.in_log
        or item.position > best.position
        or not progress.went_on(steps, item.at, item.rank)
    ]


def _is_normal(line: Line) -> bool:
    """Return whether a line is the job's own output and not part of a traceback."""
    text = line.text
    return bool(text) and not text.startswith((" ", "Traceback", "frame #", "\t", "│", "╭", "╰"))
