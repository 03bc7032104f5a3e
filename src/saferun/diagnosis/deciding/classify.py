"""Pure: Evidence -> Diagnosis: the root cause of a failure, not its echo, and what to do.

`candidates` collects the possible meanings of all evidence, `root_cause` chooses among them, and
this file adds the texts of knowledge/failures.yaml. A failure that is known only as an exception of
the user's own is never retried. A failure that nothing explains is `unknown`, with the innermost
frame of the user's code and the nearest kinds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from saferun.base.phrases import says
from saferun.diagnosis.deciding import (
    candidates,
    cuda_codes,
    exit_codes,
    known_from,
    last_words,
    nearest,
    root_cause,
    second_reading,
)
from saferun.diagnosis.deciding.candidate import Candidate
from saferun.diagnosis.deciding.root_line import ROOT_CHARS, root_line, telling_line
from saferun.diagnosis.diagnosis import Diagnosis, Near
from saferun.diagnosis.evidence import Evidence, Observation
from saferun.diagnosis.nccl_tests import NcclTests
from saferun.diagnosis.reading import last_run, log_reader, oom_message, progress, user_frame
from saferun.diagnosis.reading.crash_stack import crash_stack
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised
from saferun.diagnosis.signatures import DECIDES, Kind, Knowledge
from saferun.inject.node.node_agreement import ECHO, ROOT, WEAK

SCHEMA = 1
_TELLS_NOTHING = ("unknown", "child-failed-no-root")
# Kinds that say little about a cause: what another node reports comes before them.
_TELLS_LITTLE = (*_TELLS_NOTHING, "node-lost", "sigterm-preempted", "nccl-timeout")
_TIMEOUTS = ("nccl-timeout", "nccl-timeout-slow-rank", "nccl-p2p-hang")
_LAST_STATEMENT = ("the log's last statement",)  # a guess, so everything else comes first
_NO_PATHS = "nccl-p2p-off"  # the mitigation by which no GPU reads another one's memory
_NUMBERS_CHARS = 8000  # most characters of a message that are searched for numbers


@dataclass(frozen=True, slots=True)
class Reading:
    """The meaning of one run's lines, and of the evidence beside them."""

    collected: candidates.Collected
    steps: tuple[root_cause.Step, ...]  # the way to the root cause; () if there is none
    diagnosis: Diagnosis

    @property
    def is_known(self) -> bool:
        """Return whether a kind was found."""
        return self.diagnosis.kind != "unknown"

    @property
    def best(self) -> Candidate | None:
        """Return the root cause; None if nothing explains the failure."""
        return self.steps[-1].taken if self.steps else None


def classify(evidence: Evidence, knowledge: Knowledge) -> Diagnosis:
    """Return what the evidence means.

    Args:
        evidence: the evidence of one attempt; any part may be missing.
        knowledge: the signs of failures (`signatures.load`).
    """
    found = read(evidence, knowledge).diagnosis
    if evidence.named in knowledge.kinds:
        by, rank = ("the process's own word",), found.root_rank
        return _diagnosis(evidence.named, knowledge, found.root_line, rank, by=by)
    return found


def read(evidence: Evidence, knowledge: Knowledge) -> Reading:
    """Read the log's last run, and all runs where the last one says nothing; see `classify`."""

    def of_run(lines: Sequence[Line]) -> Reading:
        found = _of_lines(evidence, cuda_codes.named(lines, knowledge.numbers), knowledge)
        if not found.is_known or second_reading.is_cut(found.best):
            again = second_reading.lines(found.collected.log.lines)
            second = _of_lines(evidence, again, knowledge) if again else None
            if second and second.is_known:
                return second
        return _by_last_words(found, knowledge, evidence.stderr_from)

    log = evidence.log.lines
    start = last_run.last_start(log)
    last = of_run(log[start:])
    if not start or last.diagnosis.verdict != "unknown":
        return last
    whole = of_run(log)
    if whole.diagnosis.verdict == "unknown" or not _began_again(log, start):
        return whole  # the log may be about the run before
    before = Near(whole.diagnosis.kind, 0, "", "it ended the run before the last one here")
    return replace(last, diagnosis=last.diagnosis._replace(nearest=(before,)))


def _began_again(log: Sequence[Line], start: int) -> bool:
    """Return whether steps that follow `start` were made before it, too."""
    earlier, later = progress.steps(log, 0, start), progress.steps(log, start, len(log))
    least = 3 if earlier else 100  # stdout, with a few earlier steps, may follow stderr
    ranks = {step.rank for step in later}
    went_on = any(progress.went_on(later, start, rank, least) for rank in ranks)
    return went_on and (not earlier or later[0].number <= earlier[-1].number)


def recorded(found: Diagnosis, knowledge: Knowledge) -> Diagnosis | None:
    """Return the whole of a diagnosis, of which a journal has only what is not its kind's.

    Args:
        found: what the journal has.
        knowledge: explanation and advice of the kind are in it.

    Returns:
        The diagnosis; None for a kind that is not known here.
    """
    if found.kind not in knowledge.kinds:
        return None
    line = found.root_line
    whole = _diagnosis(found.kind, knowledge, line, found.root_rank, line, found.decided_by)
    return whole._replace(stack=found.stack, user_frame=found.user_frame)


def _by_last_words(found: Reading, knowledge: Knowledge, stderr_from: int | None) -> Reading:
    """Return a failure without a known reason as the job's own if the program stated it last.

    The nearest kinds stay in it, since the line's meaning is not known.
    """
    if found.diagnosis.kind not in _TELLS_NOTHING:
        return found
    log = found.collected.log
    lines, skip = log.lines, log.framed | log.by_row.keys()
    half = found.diagnosis
    said = last_words.of_rank(lines, half.root_rank, stderr_from, skip) if found.is_known else None
    at = said if found.is_known else last_words.stated(lines)
    if at is None:
        return found
    line, text = lines[at].raw.strip()[:ROOT_CHARS], lines[at].text
    rank = lines[at].rank if lines[at].rank is not None else half.root_rank
    own = _diagnosis("user-exception", knowledge, line, rank, text, by=_LAST_STATEMENT)
    own = own._replace(user_frame=half.user_frame, nearest=half.nearest)
    return replace(found, diagnosis=own)


def _of_lines(evidence: Evidence, log: Sequence[Line], knowledge: Knowledge) -> Reading:
    """Return what lines of a log mean, with the rest of the evidence."""
    lines = exit_codes.with_ranks(log)
    collected = candidates.collect(evidence, lines, knowledge)
    if evidence.exit_code == 0 and not evidence.failures:
        return Reading(collected, (), _diagnosis("no-failure", knowledge, by=("exit status 0",)))
    root_rank = collected.exits.root_rank
    steps = root_cause.choose(collected.found, collected.exits, knowledge, lines)
    best = steps[-1].taken if steps else None
    if best is not None and best.weight >= DECIDES:
        line, by = root_line(best, knowledge), known_from.named(best, evidence)
        return Reading(collected, steps, _diagnosis(best.kind, knowledge, line, best.rank, by=by))
    silent = collected.exits.silent_rank if best and best.kind in root_cause.SILENT else None
    ended = exit_codes.rank_of(best.kind, lines) if best else None
    ranks = (best.rank if best else None, ended, silent, root_rank)
    rank = next((rank for rank in ranks if rank is not None), None)
    if best is None or best.kind == "unknown":
        found = _diagnosis("unknown", knowledge, telling_line(collected.lines), rank)
        half = found._replace(
            user_frame=user_frame.innermost(collected.lines),
            nearest=nearest.closest(collected, knowledge),
        )
        return Reading(collected, steps, half)
    line, by = root_line(best, knowledge), known_from.named(best, evidence)
    alike = (one.text for one in collected.found if one.kind == best.kind)
    numbers = knowledge.kinds[best.kind].numbers  # another line of the kind may have them
    text = next((text for text in (best.text, *alike) if re.search(numbers, text)), best.text)
    stall = evidence.stall if best.kind in _TIMEOUTS else None
    if stall is not None:  # the waiting ranks report the timeout; the one that causes it may not
        by = (*by, f"the watch: {stall.line}")
    awaited = rank if stall is None or stall.rank is None else stall.rank
    diagnosis = _diagnosis(best.kind, knowledge, line, awaited, text, by=by)
    diagnosis = diagnosis._replace(
        stack=crash_stack(evidence.log.lines, rank),
        user_frame=_frame(best.raised, best.source.raised) if best.raised is not None else "",
    )
    return Reading(collected, steps, diagnosis)


def _frame(raised: Raised, beside: Sequence[Raised]) -> str:
    """Return where the user's code was at the raise, else where the chain shows it."""
    others = (one for one in beside if one.chain == raised.chain)
    stacks = (log_reader.of_text(one.frames).lines for one in (raised, *others))
    return next(filter(None, map(user_frame.innermost, stacks)), "")


def by_machine(
    diagnosis: Diagnosis, observed: Iterable[Observation], knowledge: Knowledge
) -> Diagnosis:
    """Return the diagnosis, or the machine's explanation if nothing else tells what happened.

    Args:
        diagnosis: the diagnosis from all other evidence.
        observed: observations by priority; they are made lazily, and not at all if the cause is
            known.
        knowledge: the signs of failures.
    """
    if diagnosis.kind not in _TELLS_NOTHING and diagnosis.decided_by != _LAST_STATEMENT:
        return diagnosis
    for one in observed:
        kind = one.kind or _kind_of(one.text.lower(), knowledge)
        half = diagnosis.decided_by or diagnosis.nearest
        if kind and not (half and kind in _TELLS_NOTHING):
            rank, by = diagnosis.root_rank, (one.source,)
            found = _diagnosis(kind, knowledge, one.text, rank, one.text, by=by)
            return found._replace(stack=diagnosis.stack, gpu=one.gpu)
    return diagnosis


def _kind_of(text: str, knowledge: Knowledge) -> str:
    """Return the kind that a line (lower case) of the machine proves by itself; "" for none."""
    signs = (sign for sign in knowledge.signs if sign.stands_alone)
    return next((s.kind for s in signs if any(says(needle, text) for needle in s.says)), "")


def weight(diagnosis: Diagnosis, knowledge: Knowledge) -> int:
    """Return what a diagnosis weighs among those of several nodes (node_agreement.py)."""
    if knowledge.kinds[diagnosis.kind].echo:
        return ECHO
    little = diagnosis.kind in _TELLS_LITTLE or diagnosis.decided_by == _LAST_STATEMENT
    return WEAK if little else ROOT


def by_nodes(
    diagnosis: Diagnosis, lost: str, knowledge: Knowledge, *, ends: bool = False
) -> Diagnosis:
    """Return the diagnosis, or that of lost nodes if nothing on this node is a cause.

    Args:
        diagnosis: the diagnosis from all other evidence.
        lost: the agent's message on lost nodes; "" for none.
        knowledge: the signs of failures.
        ends: the loss ends the run, so it overrides any other cause.
    """
    if not lost or (weight(diagnosis, knowledge) == ROOT and not ends):
        return diagnosis
    return _diagnosis("node-lost", knowledge, lost, by=("the agents' heartbeats",))


def by_nccl(
    diagnosis: Diagnosis, tests: NcclTests | None, before: str, knowledge: Knowledge
) -> Diagnosis:
    """Return the diagnosis of a failed collective with the result of NCCL's own path tests.

    Args:
        diagnosis: the diagnosis from all other evidence.
        tests: NCCL's answer in this attempt; None if it was not asked.
        before: the finding of an earlier attempt; "" for none. It does not change the kind, since
            the paths may differ now.
        knowledge: the signs of failures.
    """
    tests = tests or NcclTests(before)
    if diagnosis.group != "collective" or not tests.finding:
        return diagnosis
    by = (*diagnosis.decided_by, tests.finding)
    if tests.is_wrong:
        return _diagnosis("gpu-p2p-corrupt", knowledge, tests.line, tests.rank, by=by)
    nobody = diagnosis.kind == "hang" and diagnosis.root_rank is None
    if tests.line and (nobody or diagnosis.kind == "nccl-timeout"):
        return _diagnosis("nccl-p2p-hang", knowledge, tests.line, diagnosis.root_rank, by=by)
    first = [name for name in diagnosis.mitigations if tests.line and name == _NO_PATHS]
    rest = [name for name in diagnosis.mitigations if name not in first]
    return diagnosis._replace(mitigations=(*first, *rest), decided_by=by)


def _diagnosis(
    name: str,
    knowledge: Knowledge,
    line: str = "",
    rank: int | None = None,
    text: str = "",
    by: tuple[str, ...] = (),
) -> Diagnosis:
    """Return the diagnosis of a kind.

    Args:
        name: the kind's name.
        knowledge: has the kind's explanation and advice.
        line: the root line; "" without one.
        rank: the rank on which the failure began; None if unknown.
        text: the message, which may hold numbers for the explanation.
        by: the evidence that decided.
    """
    kind = knowledge.kinds[name]
    return Diagnosis(
        kind=name,
        group=kind.group,
        verdict=kind.verdict,
        mitigations=kind.mitigations,
        root_line=line,
        root_rank=rank,
        explanation=" ".join(part for part in (kind.explanation, _numbers(kind, text)) if part),
        advice=kind.advice,
        references=kind.references,
        decided_by=by,
    )


def _numbers(kind: Kind, text: str) -> str:
    """Return the message's numbers as a sentence; "" if it has none."""
    if kind.name.startswith("cuda-oom"):
        return oom_message.sentence(oom_message.read(text))
    found = re.search(kind.numbers, text[:_NUMBERS_CHARS]) if kind.numbers else None
    return kind.detail.format(**found.groupdict()) if found else ""


_NEUTRAL = (
    (re.compile(r"0x[0-9a-fA-F]{1,16}|\b[0-9a-f]{12,64}\b"), "H"),
    (re.compile(r"(?:/[^\s:'\",()]{1,200}){2,40}"), "P"),
    (re.compile(r"\d{1,20}(?:\.\d{1,20})?"), "N"),
    (re.compile(r"\s{1,40}"), " "),
)


def fingerprint(diagnosis: Diagnosis) -> str:
    """Return what two occurrences of one failure share: the kind, and the line without details.

    Ranks, numbers, addresses and directories are removed.
    """
    line = log_reader.strip_prefixes(diagnosis.root_line)[1]
    for pattern, placeholder in _NEUTRAL:
        line = pattern.sub(placeholder, line)
    return f"{diagnosis.kind}: {line.strip()}"
