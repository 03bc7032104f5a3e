"""Pure: everything that the evidence of a failure may mean, each with its weight.

An explanation comes from a sign that fits a place of the log, from an exception that no sign knows,
or from a process's exit code or signal. root_cause.py chooses among them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from saferun.diagnosis import signatures
from saferun.diagnosis.deciding import exit_codes, matches, refinements
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.reading import digit_masks, progress, tracebacks, user_frame
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.tracebacks import Raised
from saferun.diagnosis.signatures import USER, WEIGHTS, Knowledge, Sign
from saferun.named_tuple import NamedTuple

# After so many lines without another explanation the job had survived what stands before them.
_GAP_LINES = 400
_LONG_GAP_LINES = 3000
_SURVIVED, _SURVIVED_LONG = 40, 5  # the most that such an explanation weighs
_MANY_STEPS = 100  # of any rank: in the next step the others would have waited for the failed one
_OVER = "Root Cause (first observed"  # of the launcher's last words: no step is made behind them
_BUFFER_BYTES = 8 * 1024  # of a process's stdout, which it writes as it ends
_NO_LIMIT = 1000  # above every weight
_WENT_ON_LINES = 10  # behind a line that says that the program goes on: it did
_BRIEF_LINES = 80  # in so short a log, a phrase outside an exception can be a reason to retry
# Exceptions that only pass on what another process or exception reported.
_WRAPPERS = frozenset(
    ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError",
     "RayTaskError", "SystemExit", "RayActorError", "ActorDiedError", "SignalException",
     "WorkerCrashedError", "SubprocessError", "EngineDeadError", "ProcessException",
     "ActorUnavailableError", "OwnerDiedError", "LocalRayletDiedError", "CheckpointException")
)  # fmt: skip
_ENDED_ELSEWHERE = re.compile(
    r"\A.{0,400}terminated with (?:signal|exit code)|-- Process \d{1,5} terminated|"
    r"died with <Signals|is detected by the operating system|-- Tracebacks above this line|"
    r"[Ss]ee (?:the )?(?:root cause above|stack trace for root cause)"
)
_WRAPPED = re.compile(r"\bRayTaskError\((\w{1,80})\)")
_OF_CUT = {  # a traceback without its last line
    "own": ("user-exception", WEIGHTS["process"]),
    "likely": ("user-exception", WEIGHTS["hint"] + 1),
    "": ("unknown", WEIGHTS["hint"]),
}
# A traceback's; the dump of a stack (faulthandler) has no comma behind the number.
_FRAME = re.compile(r'File "[^"]{1,400}", line \d{1,9}, in ')
_NEVER_MET = "nccl-p2p-hang"  # by its last lines a log shows that no collective came to its end
_PASSED_ON = re.compile(r"Caught \w{1,80} in (?:DataLoader worker|replica|pin memory)")
# Exceptions that programs use for control flow: one raised while handling them explains more.
_CONTROL_FLOW = frozenset(
    ("KeyError", "AttributeError", "StopIteration", "Empty", "IndexError", "ImportError",
     "ModuleNotFoundError", "TypeError", "StopAsyncIteration", "LookupError")
)  # fmt: skip


class Explanation(NamedTuple):
    """One explanation of a failure."""

    kind: str
    weight: float
    at: int  # index of its line; -1 where it comes from an exit code alone
    rank: int | None
    text: str
    raised: Raised | None = None
    generic: bool = False  # nothing is known but the exception
    explains: frozenset[str] = frozenset()  # kinds that are its consequence
    source: str = "sign"  # "sign", "exception", "exit code"
    usual: str = ""  # the kind that it has where nothing else is known; "" where it is the same
    why: tuple[str, ...] = ()  # what took weight from it
    sign: Sign | None = None  # that fits the place


class Collected(NamedTuple):
    """What a log and the evidence beside it may mean."""

    lines: Sequence[Line]
    text: matches.Text
    found: list[Explanation]
    exits: exit_codes.Exits
    left_out: tuple[matches.Match, ...]  # phrases that do not count there
    outlived: tuple[Explanation, ...]  # what the job made steps after


def collect(evidence: Evidence, lines: Sequence[Line], knowledge: Knowledge) -> Collected:
    """Return every explanation of a failure, and how processes ended.

    Args:
        evidence: of the attempt.
        lines: its error files' tracebacks, then its log.
        knowledge: how failures look.
    """
    alike = digit_masks.of(lines)
    exceptions = tracebacks.find(lines, alike).without_consequences()
    exits = exit_codes.find(lines, exceptions.framed, alike)
    text = matches.Text(lines, exceptions, alike)
    fitting = matches.match(knowledge, text)
    known = refinements.KindRefinement(fitting, evidence, lines)
    brief = evidence.log.line_count <= _BRIEF_LINES
    left_out = tuple(
        m
        for m in fitting
        if (m.why == matches.GOING_ON and m.at < len(lines) - _WENT_ON_LINES)
        or (not brief and m.weight == WEIGHTS["bare"] and not knowledge.kinds[m.kind].stops)
    )
    skipped = {id(m) for m in left_out}
    matched = (_of_match(m, known.kind_of(m)) for m in fitting if id(m) not in skipped)
    found = _with_first_of_chains(list(matched))
    if (at := known.wrong_values()) is not None:
        found.append(Explanation("gpu-p2p-corrupt", WEIGHTS["hard"], at, None, lines[at].text))
    explained = {m.raised.at for m in fitting if m.raised}
    found += _of_unknown_exceptions(exceptions.raised, explained, knowledge, known, lines)
    found = _with_survived_weights(_without_cut(found), lines)
    found += _of_exits(evidence, exits, lines, known)
    found, outlived = _apart_outlived(found, lines)
    return Collected(lines, text, found, exits, left_out, tuple(outlived))


def _of_match(match: matches.Match, kind: str) -> Explanation:
    """Return the explanation that a match is, under the kind that circumstances give it."""
    return Explanation(
        kind,
        match.weight,
        match.at,
        match.rank,
        match.text,
        match.raised,
        explains=match.explains,
        usual=match.kind if kind != match.kind else "",
        why=(match.why,) if match.why else (),
        sign=match.sign,
    )


def _with_first_of_chains(found: Sequence[Explanation]) -> list[Explanation]:
    """Let none weigh more that was raised while a failure of a known kind was handled."""
    first: dict[int, Explanation] = {}
    for item in sorted(found, key=lambda one: one.at):
        if item.raised is not None and item.weight >= WEIGHTS["cause"]:
            first.setdefault(item.raised.chain, item)
    return [
        item._replace(weight=min(item.weight, first[item.raised.chain].weight))
        if item.raised is not None and item.raised.link == "context" and item.raised.chain in first
        else item
        for item in found
    ]


# By convention the status of a program that ends itself after a SIGTERM, as Lightning does.
_ENDED_BY_REQUEST = 143  # 128 + SIGTERM


def _of_exits(
    evidence: Evidence,
    exits: exit_codes.Exits,
    lines: Sequence[Line],
    known: refinements.KindRefinement,
) -> Iterator[Explanation]:
    """Yield what exit codes and signals mean: of the log, of the error files, of the launcher."""
    for sign in exits.signs:
        text = " ".join(line.text for line in lines[sign.at : sign.at + 2])
        place = (sign.weight, sign.at, sign.rank, text)
        yield _of_exit(sign.kind, known, sign.at + 1, place)  # a bar may be before it
    for failure in evidence.failures:
        if failure.exit_code is not None and (meant := exit_codes.kind_of(failure.exit_code)):
            kind, weight = meant
            yield _of_exit(kind, known, len(lines), (weight, -1, failure.rank, ""))
    # torchrun returns 1 whatever happened
    code = evidence.exit_code
    if evidence.exited and code and code != _ENDED_BY_REQUEST:
        code = 1  # the script's own number
    if code not in (None, 1) and (meant := exit_codes.kind_of(code)):
        kind, weight = meant
        yield _of_exit(kind, known, len(lines), (weight - 2, -1, None, ""))


def _of_exit(
    usual: str,
    known: refinements.KindRefinement,
    end: int,
    place: tuple[int, int, int | None, str],
) -> Explanation:
    """Return what a signal of a usual kind explains.

    Args:
        usual: the kind.
        known: what may change it.
        end: index after the last line up to it.
        place: weight, index of the line, rank and text.
    """
    kind = known.of_signal(usual, end)
    return Explanation(kind, *place, source="exit code", usual=usual if kind != usual else "")


def _of_unknown_exceptions(
    raised: Iterable[Raised],
    explained: set[int],
    knowledge: Knowledge,
    known: refinements.KindRefinement,
    lines: Sequence[Line],
) -> Iterator[Explanation]:
    """Yield one explanation for each chain of exceptions that no sign fits.

    Args:
        raised: all exceptions of the log.
        explained: the lines of those that a sign fits.
        knowledge: what a class or a phrase of an exception means.
        known: what may change that.
        lines: the log's.
    """
    chains: dict[int, list[Raised]] = {}
    for item in raised:
        chains.setdefault(item.chain, []).append(item)
    for chain in chains.values():
        if any(item.at in explained for item in chain) or not _is_read(chain[0]):
            continue
        root = _root_of_chain(chain)
        yield _of_unknown(root, knowledge, known, lines)


def _of_unknown(
    root: Raised,
    knowledge: Knowledge,
    known: refinements.KindRefinement,
    lines: Sequence[Line],
) -> Explanation:
    """Return what an exception explains that no sign fits."""
    kind, weight = _by_class(root, knowledge)
    why: tuple[str, ...] = ()
    if not root.type or root.is_thrown:
        why = ("the traceback is cut before its exception",)
    if root.background or matches.goes_on(root, lines):
        weight, why = WEIGHTS["hint"], ("the process went on after it",)
    lost = kind == "user-exception" and known.is_lost_server(root)
    return Explanation(
        "hub-unavailable" if lost else kind,
        weight,
        root.at,
        root.rank,
        root.text,
        root,
        generic=True,
        source="exception",
        usual=kind if lost else "",
        why=why,
    )


def _without_cut(found: Sequence[Explanation]) -> list[Explanation]:
    """Return the explanations without cut tracebacks whose message stands in the next line.

    Only the exception's name is missing there, and the message is known.
    """
    stated = {(item.at, item.rank) for item in found if item.weight >= WEIGHTS["bare"]}
    return [
        item
        for item in found
        if item.raised is None or item.raised.type or (item.at + 1, item.rank) not in stated
    ]


def _apart_outlived(
    everything: Sequence[Explanation], lines: Sequence[Line]
) -> tuple[list[Explanation], list[Explanation]]:
    """Return the explanations, and apart those that the job outlived: no cause of its end.

    What comes again at the end is found there once more, and counts, unless the job had outlived
    that line more than once.
    """
    over_at = (at for at in range(len(lines) - 1, -1, -1) if _OVER in lines[at].text)
    steps = progress.steps(lines, 0, next(over_at, len(lines))) if everything else []
    if not steps:
        return list(everything), []
    past = [_is_outlived(item, everything, lines, steps) for item in everything]
    often = Counter(
        digit_masks.of_word(lines[item.at].text)
        for item, over in zip(everything, past, strict=True)
        if over and _is_said(item)
    )
    kept: list[Explanation] = []
    outlived: list[Explanation] = []
    for item, over in zip(everything, past, strict=True):
        again = (
            item.at >= 0 and _is_said(item) and often[digit_masks.of_word(lines[item.at].text)] > 1
        )
        (outlived if over or again else kept).append(item)
    return kept, outlived


def _is_outlived(
    item: Explanation,
    everything: Sequence[Explanation],
    lines: Sequence[Line],
    steps: Sequence[progress.Step],
) -> bool:
    """Return whether a job made enough steps after an explanation's line.

    A few steps show that it outlived what a line says. The end of a process takes more: it is its
    last act to write what its stdout still holds, so that steps from before an exception stand
    behind it.
    """
    if item.at < 0 or not lines[item.at].number:
        return False
    at = 0 if item.kind == _NEVER_MET else item.at
    ranks = {step.rank for step in steps}
    remark = item.weight <= WEIGHTS["bare"] and item.source == "sign"
    whose = ranks if remark or item.rank is None else {item.rank}
    many = any(progress.went_on(steps, at, rank, _MANY_STEPS) for rank in ranks)
    if not many and not any(progress.went_on(steps, at, rank) for rank in whose):
        return False
    later = (other for other in everything if not 0 <= other.at <= steps[-1].at)
    if _is_said(item) or (many and any(one.kind != "child-failed-no-root" for one in later)):
        return True
    alike = sum(other.kind == item.kind for other in everything)
    return progress.is_written(lines, steps, at, alike * _BUFFER_BYTES)


def _is_said(item: Explanation) -> bool:
    """Return whether it is what a line says: no process's end, no exception with its traceback."""
    headed = item.raised is not None and item.raised.headed
    return not headed and item.weight < WEIGHTS["hard"] and item.source != "exit code"


def _is_read(item: Raised) -> bool:
    """Return whether it is an exception or a traceback; a frame or a stack's dump is none.

    A line that only says "Error", as a field of a record does, is none either.
    """
    if item.type == "Error" and not item.headed and item.text.strip() == item.type:
        return False
    return bool(item.type or item.headed) or len(_FRAME.findall(item.frames)) > 1


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
    if not item.type:  # a traceback that is cut before its last line
        return _OF_CUT[user_frame.of_cut(item.frames)]
    if item.is_thrown:  # a cut one whose last line is the `raise`
        return "user-exception", WEIGHTS["process"]
    if _is_wrapper(item):
        return _of_wrapped(item, knowledge), WEIGHTS["hint"] + 3
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


def _of_wrapped(item: Raised, knowledge: Knowledge) -> str:
    """Return what a wrapper means by the class of the exception that it names, as Ray's does."""
    found = _WRAPPED.search(item.text)
    if found is None or found[1] in _WRAPPERS:
        return "child-failed-no-root"
    kinds = (sign.kind for sign in knowledge.signs if found[1] in sign.types and sign.stands_alone)
    return next(kinds, knowledge.classes.get(found[1], "child-failed-no-root"))


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
        if item.weight > limit:
            why = (*item.why, "the job lived on: many lines follow")
            item = item._replace(weight=limit, why=why)
        weighed.append(item)
    return weighed
