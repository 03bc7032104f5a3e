"""Pure: Evidence -> Diagnosis. The root of a failure, not its echo, and what to do about it.

Every place of the log that says something is weighed (signatures.py); this room decides between
them: what weighs most, on the rank that failed first, where it stands first. What is known only as
an exception of the user's own is never retried, and what nothing explains is `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from saferun.diagnosis import exit_codes, log_reader, oom_message, progress, signatures, tracebacks
from saferun.diagnosis.evidence import Evidence, RankFailure
from saferun.diagnosis.log_reader import Line
from saferun.diagnosis.signatures import USER, WEIGHTS, Knowledge, Match
from saferun.diagnosis.tracebacks import Raised

SCHEMA = 1
ROOT_CHARS = 600
_TELLING = ("error", "exception", "fail", "fatal", "abort", "kill", "denied", "invalid", "cannot")
# A place this many lines before the next one belongs to something that the job survived.
_GAP_LINES = 400
_LONG_GAP_LINES = 3000
_EARLIER, _LONG_AGO = 40, 5  # what such a place can weigh at most
_MESSAGE_LINES = 8  # of an exception; what follows may be output already
_BRIEF_LINES = 80  # in so short a log, bare words can be the reason to try again
_SEPARATE_LINES = 3  # of normal output between a handled exception and the one that ended it
# Exceptions that only pass on what another process or exception said.
_WRAPPERS = frozenset(
    ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError",
     "RayTaskError", "SystemExit", "RayActorError", "ActorDiedError", "SignalException",
     "WorkerCrashedError", "SubprocessError", "EngineDeadError", "ProcessException",
     "ActorUnavailableError", "OwnerDiedError", "LocalRayletDiedError")
)  # fmt: skip
# How a rank ends that says nothing: what the others then see is not the cause.
_SILENT = ("child-failed-no-root", "user-args-error")
# What ends a rank without a word; an abort may follow any other echo, so it explains no other.
_SILENT_TO_PEERS = (*_SILENT, "abort-unknown", "sigterm-preempted")
_ENDED_ELSEWHERE = re.compile(
    r"\A.{0,400}terminated with (?:signal|exit code)|-- Process \d{1,5} terminated|"
    r"died with <Signals|-- Tracebacks above this line|"
    r"[Ss]ee (?:the )?(?:root cause above|stack trace for root cause)"
)
_BARE = re.compile(r"(?:^|[\s.])\w{1,80}(?:Error|Exception):$")
_PASSED_ON = re.compile(r"Caught \w{1,80} in (?:DataLoader worker|replica|pin memory)")
# Exceptions that steer a program; one that came while handling them says more.
_STEERING = frozenset(
    ("KeyError", "AttributeError", "StopIteration", "Empty", "IndexError", "ImportError",
     "ModuleNotFoundError", "TypeError", "StopAsyncIteration", "LookupError")
)  # fmt: skip
_TALK = ("collective", "rendezvous")
_BARRIER = re.compile(r"world_size=(\d{1,6}), worker_count=(\d{1,6})")


class Diagnosis(NamedTuple):
    """What failed and what to do."""

    kind: str
    group: str
    verdict: str  # retry, mitigate, stop-user, stop-hardware, unknown
    mitigations: tuple[str, ...]
    root_line: str  # as printed; "" where there is none
    root_rank: int | None
    explanation: str
    advice: str
    references: tuple[str, ...]


class _Found(NamedTuple):
    """One explanation of the failure."""

    kind: str
    weight: float
    at: int  # index of its line
    rank: int | None
    text: str
    raised: Raised | None = None
    generic: bool = False  # nothing is known but the exception


def classify(evidence: Evidence, knowledge: Knowledge) -> Diagnosis:
    """Return what the evidence means.

    Args:
        evidence: of one attempt; any part of it may be missing.
        knowledge: how failures look (`knowledge.load_failures`).
    """
    if evidence.exit_code == 0 and not evidence.failures:
        return _diagnosis("no-failure", knowledge, "", None, "")
    if evidence.unkillable:
        return _diagnosis("process-unkillable", knowledge, "", None, "")
    if evidence.reader_gone and (unread := _writes_to_nobody(evidence)):
        return _diagnosis("output-reader-gone", knowledge, unread.raw, unread.rank, "")
    lines = (*_filed(evidence.failures), *exit_codes.by_rank(evidence.log.lines))
    found, ended = _all(evidence, lines, knowledge)
    best = _best(found, ended.root_rank, knowledge, lines)
    if best is None:
        return _diagnosis("unknown", knowledge, telling_line(lines), ended.root_rank, "")
    ranks = (best.rank, exit_codes.rank_of(best.kind, lines), ended.root_rank)
    rank = next((rank for rank in ranks if rank is not None), None)
    line = telling_line(lines) if best.at < 0 else _root_line(best, lines, knowledge)
    return _diagnosis(best.kind, knowledge, line, rank, best.text)


def _writes_to_nobody(evidence: Evidence) -> Line | None:
    """Return the line that says so, where the job failed since what it writes to has gone."""
    lines = (*_filed(evidence.failures), *evidence.log.lines)
    return next((line for line in lines if "[Errno 32] Broken pipe" in line.text), None)


def _filed(failures: Sequence[RankFailure]) -> tuple[Line, ...]:
    """Return the error files' tracebacks as lines that stand before the log, earliest first."""
    ordered = sorted(failures, key=lambda f: (f.time_s is None, f.time_s or 0.0))
    return tuple(
        Line(0, failure.rank, text, text)
        for failure in ordered
        for text in (failure.traceback or failure.message).splitlines()
    )


def _all(
    evidence: Evidence, lines: Sequence[Line], knowledge: Knowledge
) -> tuple[list[_Found], exit_codes.Exits]:
    """Return every explanation that the evidence offers, and how processes ended."""
    seen = tracebacks.find(lines)
    matches = signatures.match(knowledge, lines, seen.raised, seen.framed)
    ended = exit_codes.find(lines, seen.framed)
    brief = evidence.log.line_count <= _BRIEF_LINES
    found = [
        _Found(_by_circumstance(m, evidence, lines), m.weight, m.at, m.rank, m.text, m.raised)
        for m in matches
        if brief or m.weight != WEIGHTS["bare"] or _stops(m.kind, knowledge)
    ]
    explained = {m.raised.at for m in matches if m.raised}
    found += _generic(seen.raised, explained, knowledge, lines)
    found = _faded(found, lines)
    found += [
        _Found(_by_machine(e.kind, evidence), e.weight, e.at, e.rank, _after(lines, e.at))
        for e in ended.ended
    ]
    for failure in evidence.failures:
        if failure.exit_code is not None and (known := exit_codes.kind_of(failure.exit_code)):
            kind = _by_machine(known[0], evidence)
            found.append(_Found(kind, known[1], -1, failure.rank, ""))
    # 1 says nothing: torchrun returns it whatever happened
    if evidence.exit_code not in (None, 1) and (known := exit_codes.kind_of(evidence.exit_code)):
        found.append(_Found(_by_machine(known[0], evidence), known[1] - 2, -1, None, ""))
    return found, ended


_CRASHES = (  # kinds that a crash's signal alone stands for
    *("abort-unknown", "dataloader-shm-full", "illegal-instruction"),
    *("segfault", "segfault-environment"),
)


def _by_machine(kind: str, evidence: Evidence) -> str:
    """Return what a bare signal means where the machine was watched: its usual cause, or not."""
    if evidence.finished and kind in _CRASHES:
        return "crash-after-the-end"
    if kind == "host-oom-killed" and evidence.oom_kills == 0:
        return "killed-from-outside"
    if kind == "dataloader-shm-full" and evidence.shm_ample:
        return "bus-error"
    return kind


def _stops(kind: str, knowledge: Knowledge) -> bool:
    return knowledge.kinds[kind].verdict.startswith("stop")


def _after(lines: Sequence[Line], at: int) -> str:
    return " ".join(line.text for line in lines[at : at + 2])


def _generic(
    all_raised: Iterable[Raised], known: set[int], knowledge: Knowledge, lines: Sequence[Line]
) -> Iterable[_Found]:
    """Yield one explanation for each chain of exceptions that no sign knows."""
    chains: dict[int, list[Raised]] = {}
    for item in all_raised:
        chains.setdefault(item.chain, []).append(item)
    for chain in chains.values():
        if any(item.at in known for item in chain) or not (chain[0].type or chain[0].headed):
            continue
        root = _root_of_chain(chain)
        kind, weight = _by_class(root, knowledge)
        if root.background or signatures.goes_on(root, lines):
            weight = WEIGHTS["hint"]
        yield _Found(kind, weight, root.at, root.rank, root.text, root, True)


def _root_of_chain(chain: Sequence[Raised]) -> Raised:
    """Return the exception to blame: the first one, unless it only steered the program."""
    real = [item for item in chain if not _is_wrapper(item)] or list(chain)
    for item, following in zip(real, [*real[1:], None], strict=True):
        if following is None or following.link != "context" or item.name not in _STEERING:
            return item
    return real[-1]


def _is_wrapper(item: Raised) -> bool:
    return item.name in _WRAPPERS or _ENDED_ELSEWHERE.search(item.text) is not None


def _by_class(item: Raised, knowledge: Knowledge) -> tuple[str, int]:
    """Return kind and weight of an exception by its class, else by its words."""
    if not item.type:
        return "unknown", WEIGHTS["hint"]
    if _is_wrapper(item):
        return "child-failed-no-root", WEIGHTS["hint"] + 3
    if item.type == "Error" and not item.headed:  # of any program in the log
        return "user-exception", WEIGHTS["bare"]
    weight = USER if not _PASSED_ON.search(item.text) else USER - 1
    kind = knowledge.classes.get(item.name)
    if kind == "interrupted":
        return kind, WEIGHTS["process"] + 3
    if kind is None:
        text = item.text.lower()
        kind = next((k for needle, k in knowledge.phrases if signatures.says(needle, text)), None)
    return kind or "user-exception", weight


def _faded(found: Sequence[_Found], lines: Sequence[Line]) -> list[_Found]:
    """Take weight from what the job outlived: much was printed after it."""
    faded: list[_Found] = []
    limit, later = 1000, len(lines) and lines[-1].number
    for item in sorted(found, key=lambda f: f.at, reverse=True):
        number = lines[item.at].number if item.at >= 0 else 0
        if later - number > _GAP_LINES and number:
            limit = min(limit, _LONG_AGO if later - number > _LONG_GAP_LINES else _EARLIER)
        later = number or later
        faded.append(item._replace(weight=min(item.weight, limit)))
    return faded


def _best(
    found: Sequence[_Found], root_rank: int | None, knowledge: Knowledge, lines: Sequence[Line]
) -> _Found | None:
    """Return the explanation that weighs most, the first rank's and the first one among equals."""
    if not found:
        return None

    def order(item: _Found) -> tuple[float, bool, bool, int]:
        elsewhere = root_rank is not None and item.rank is not None and item.rank != root_rank
        return (-item.weight, elsewhere, item.at < 0, item.at)

    best = min(found, key=order)
    if best.weight <= WEIGHTS["echo+"] and best.rank not in (None, root_rank):
        kinds = _SILENT_TO_PEERS if best.kind == "peer-lost" else _SILENT
        silent = [item for item in found if item.kind in kinds and item.rank == root_rank]
        best = min(silent, key=order, default=best) if root_rank is not None else best
    if WEIGHTS["process"] < best.weight <= WEIGHTS["echo+"]:
        best = _left_before(best, found) or best
    if best.weight < WEIGHTS["hard"]:
        stops = _stops(best.kind, knowledge)
        talk = knowledge.kinds[best.kind].group in _TALK and not stops
        own = [item for item in found if _own_fault(item, best, lines, after_only=stops, talk=talk)]
        best = min(_not_outlived(own, best, lines), key=order, default=best)
    return best


def _left_before(echo: _Found, found: Sequence[_Found]) -> _Found | None:
    """Return what was told before its peers said anything: a rank's end without a reason, as a
    launcher tells it, or a reason without the exception around it. What they see came of that.
    (An exception that passes on what they see, in the line after it, is not such a word.)"""
    told = [item for item in found if item.at >= 0 and item.weight > WEIGHTS["hint"]]
    if echo.raised:
        told = [i for i in told if i.raised is None or i.raised.rows[-1] + 1 != echo.at]
    first = min(told, key=lambda item: (item.at, -item.weight), default=echo)
    known = first.weight == WEIGHTS["bare"] and not first.generic
    return first if known or first.kind in _SILENT else None


def _own_fault(
    item: _Found, best: _Found, lines: Sequence[Line], after_only: bool = False, talk: bool = False
) -> bool:
    """Return whether an exception of the user's own, not what seems best, ended the job.

    One that stands before it on another chain came first. One that stands after it, apart from
    it, means that the job had survived it.
    """
    if not item.generic or item.weight < USER - 1 or item.raised is None:
        return False
    if best.raised is not None and best.raised.chain == item.raised.chain:
        return False
    if item.at < best.at:
        return not after_only
    if talk and item.raised.headed:
        return True
    same = item.rank == best.rank
    end = min(best.raised.rows[-1], best.at + _MESSAGE_LINES) if best.raised else best.at
    between = lines[end + 1 : item.at]
    normal = sum(1 for line in between if _is_normal(line))
    return same and normal > _SEPARATE_LINES


def _not_outlived(own: Sequence[_Found], best: _Found, lines: Sequence[Line]) -> list[_Found]:
    """Return the exceptions after which the job made no steps before a later failure, `best`.

    Without a failed rank its peers make none: the next collective holds them. (An echo, or a crash
    at exit, weighs less than an exception and is never `best` here; it would prove nothing, as a
    rank's stdout may be written when it ends.)
    """
    early = [item.at for item in own if item.at < best.at and lines[item.at].number]
    if not early:
        return list(own)
    told = progress.steps(lines, min(early), best.at)
    return [
        item
        for item in own
        if item.at > best.at
        or not lines[item.at].number
        or not progress.went_on(told, item.at, item.rank)
    ]


def _is_normal(line: Line) -> bool:
    """Return whether a line is a job's own output and not part of a traceback."""
    text = line.text
    return bool(text) and not text.startswith((" ", "Traceback", "frame #", "\t", "│", "╭", "╰"))


def _by_circumstance(best: Match, evidence: Evidence, lines: Sequence[Line]) -> str:
    """Return the kind, where numbers or how long it ran decide between look-alikes."""
    if best.kind == "cuda-oom":
        return oom_message.kind(oom_message.read(best.text))
    if best.kind == "rendezvous-connect-failed" and (counts := _BARRIER.search(best.text)):
        return "stale-rendezvous-store" if int(counts[2]) > int(counts[1]) else best.kind
    if best.kind == "cuda-illegal-access" and _ran_long(evidence, lines[: best.at]):
        return "cuda-illegal-access-sporadic"
    if "killed by signal" in best.text:  # a DataLoader worker: torch knows no more than the number
        return _by_machine(best.kind, evidence)
    return best.kind


def _ran_long(evidence: Evidence, before: Sequence[Line]) -> bool:
    """Return whether the job had made long, healthy progress."""
    if progress.diverged(before):
        return False
    if (evidence.age_s or 0.0) >= progress.LONG_S or (evidence.step or 0) >= progress.LONG_STEPS:
        return True
    return progress.is_long(before)


def _root_line(best: _Found, lines: Sequence[Line], knowledge: Knowledge) -> str:
    """Return the deciding line as it was printed: of an exception, the row that says it."""
    row = best.at
    if best.raised is not None:
        row = _row_that_says(best, lines, knowledge)
    line = lines[row].raw.strip()
    if _BARE.search(line) and best.raised is not None:  # the message begins on the next line
        rest = (lines[at].text.strip() for at in best.raised.rows if at > row)
        line = " ".join([line, *[text for text in rest if any(map(str.isalnum, text))][:1]])
    return line[:ROOT_CHARS]


def _row_that_says(best: _Found, lines: Sequence[Line], knowledge: Knowledge) -> int:
    """Return which line of an exception's message holds the sign, the most telling word first."""
    assert best.raised is not None
    rows = [(row, lines[row].text.lower()) for row in best.raised.rows]
    for sign in knowledge.signs:
        if sign.kind == _family(best.kind):
            for needle in sign.says:
                for row, text in rows:
                    if signatures.says(needle, text):
                        return row
    return best.at


def _family(kind: str) -> str:
    """Return the kind whose signs show this one, which only circumstances tell from it."""
    for family in ("cuda-oom", "cuda-illegal-access"):
        if kind.startswith(family):
            return family
    return "rendezvous-connect-failed" if kind == "stale-rendezvous-store" else kind


def telling_line(lines: Sequence[Line]) -> str:
    """Return the line that says most where nothing is recognised: the last one with a word of
    failure, else the last one with anything on it."""
    last = ""
    for line in reversed(lines):
        text = line.raw.strip()
        if text and any(word in text.lower() for word in _TELLING):
            return text[:ROOT_CHARS]
        last = last or text
    return last[:ROOT_CHARS]


def _diagnosis(
    name: str, knowledge: Knowledge, root_line: str, root_rank: int | None, text: str
) -> Diagnosis:
    kind = knowledge.kinds[name]
    return Diagnosis(
        kind=name,
        group=kind.group,
        verdict=kind.verdict,
        mitigations=kind.mitigations,
        root_line=root_line,
        root_rank=root_rank,
        explanation=" ".join(part for part in (kind.explanation, _numbers(kind, text)) if part),
        advice=kind.advice,
        references=kind.references,
    )


def _numbers(kind: signatures.Kind, text: str) -> str:
    """Return the message's numbers as a sentence, "" where it has none."""
    if kind.name.startswith("cuda-oom"):
        return oom_message.sentence(oom_message.read(text))
    found = re.search(kind.numbers, text[:8000]) if kind.numbers else None
    return kind.detail.format(**found.groupdict()) if found else ""


_NEUTRAL = (
    (re.compile(r"0x[0-9a-fA-F]{1,16}|\b[0-9a-f]{12,64}\b"), "H"),
    (re.compile(r"(?:/[^\s:'\",()]{1,200}){2,40}"), "P"),
    (re.compile(r"\d{1,20}(?:\.\d{1,20})?"), "N"),
    (re.compile(r"\s{1,40}"), " "),
)


def fingerprint(diagnosis: Diagnosis) -> str:
    """Return what two occurrences of the same failure share: kind and line without particulars.

    Ranks, numbers, addresses and directories are taken out.
    """
    line = log_reader.strip_prefixes(diagnosis.root_line)[1]
    for pattern, stands_for in _NEUTRAL:
        line = pattern.sub(stands_for, line)
    return f"{diagnosis.kind}: {line.strip()}"
