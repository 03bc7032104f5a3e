"""Pure: everything that the evidence of a failure may mean, each with its weight.

A candidate comes from a sign that fits a place of the log or of a rank's error file, from an
exception that no sign knows, or from a process's exit code or signal. The log and each error file
are read separately. root_cause.py chooses among the candidates.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from saferun.base.phrases import says
from saferun.base.signal_names import name_of
from saferun.diagnosis.deciding import exit_codes, last_words, matches, outside_faults, refinements
from saferun.diagnosis.deciding.candidate import LOG, Candidate, Source
from saferun.diagnosis.evidence import Evidence, RankFailure
from saferun.diagnosis.process_end import signal_of
from saferun.diagnosis.reading import digit_masks, progress, tracebacks, user_frame
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised
from saferun.diagnosis.signatures import DECIDES, USER, WEIGHTS, Knowledge

# If so many lines follow without another candidate, the job survived what stands before them.
_GAP_LINES = 400
_LONG_GAP_LINES = 3000
_SURVIVED, _SURVIVED_LONG = 40, 5  # the highest weight of such a candidate
_MANY_STEPS = 100  # with a failed rank, the others would hang in the next step
_OVER = "Root Cause (first observed"  # in the launcher's final message: no step follows it
_BUFFER_BYTES = 8 * 1024  # a process may write this much buffered stdout as it ends
_NO_LIMIT = 1000  # above every weight
_WENT_ON_LINES = 10  # with so many lines after the message that it goes on, the program did
_BRIEF_LINES = 80  # in a log this short, a phrase outside an exception can lead to a retry
# Exceptions that only report another process's or exception's failure.
_WRAPPERS = frozenset(
    ("ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError",
     "RayTaskError", "SystemExit", "RayActorError", "ActorDiedError", "SignalException",
     "WorkerCrashedError", "SubprocessError", "EngineDeadError", "ProcessException",
     "ActorUnavailableError", "OwnerDiedError", "LocalRayletDiedError", "CheckpointException")
)  # fmt: skip
_OWN = "user-exception"
_BROKEN_PIPE = "[Errno 32] Broken pipe"
_NO_CAUSE = ("unknown", "child-failed-no-root", "interrupted")  # kinds of such, of cuts, of Ctrl-C
_ENDED_ELSEWHERE = re.compile(
    r"\A.{0,400}terminated with (?:signal|exit code)|-- Process \d{1,5} terminated|"
    r"died with <Signals|is detected by the operating system|-- Tracebacks above this line|"
    r"[Ss]ee (?:the )?(?:root cause above|stack trace for root cause)"
)
_WRAPPED = re.compile(r"\bRayTaskError\((\w{1,80})\)")
_OF_A_CRASH = frozenset({"nccl-ib-error"})  # what the other end of a connection sees of it
_OF_CUT = {  # for a traceback without its last line
    "own": ("user-exception", WEIGHTS["process"]),
    "likely": ("user-exception", WEIGHTS["hint"] + 1),
    "": ("unknown", WEIGHTS["hint"]),
}
# A frame of a traceback. In the stack dump of faulthandler no comma follows the number.
_FRAME = re.compile(r'File "[^"]{1,400}", line \d{1,9}, in ')
_NEVER_MET = "nccl-p2p-hang"  # the log's last lines show that no collective came to its end
_PASSED_ON = re.compile(r"Caught \w{1,80} in (?:DataLoader worker|replica|pin memory)")
_INNER = ("CancelledError", "EOFError")  # how a time limit, or a stream, ends within a library
# Exceptions that programs use for control flow. An exception raised while one is handled explains
# more.
_CONTROL_FLOW = frozenset(
    ("KeyError", "AttributeError", "StopIteration", "Empty", "IndexError", "ImportError",
     "ModuleNotFoundError", "TypeError", "StopAsyncIteration", "LookupError", "JSONDecodeError",
     *_INNER)
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collected:
    """The possible meanings of a log and the evidence beside it."""

    texts: tuple[matches.Text, ...]  # the error files, the earliest first, then the log
    found: list[Candidate]
    exits: exit_codes.Exits
    left_out: tuple[Candidate, ...]  # phrases that do not count where they stand
    outlived: tuple[Candidate, ...]  # candidates after which the job made steps

    @property
    def log(self) -> matches.Text:
        """The log."""
        return self.texts[-1]

    @property
    def lines(self) -> list[Line]:
        """The lines of the error files and of the log."""
        return [line for text in self.texts for line in text.lines]


def collect(evidence: Evidence, lines: Sequence[Line], knowledge: Knowledge) -> Collected:
    """Return every candidate for the cause of a failure, and how processes ended.

    Args:
        evidence: the evidence of the attempt.
        lines: the log's lines.
        knowledge: the signs of failures.
    """
    log = matches.Text("log", lines)
    texts = (*_error_files(evidence.failures, log), log)
    exits = exit_codes.find(lines, log.framed, log.alike)
    fitting = [one for text in texts for one in matches.match(knowledge, text)]
    known = refinements.KindRefinement(fitting, evidence, lines)
    brief = evidence.log.line_count <= _BRIEF_LINES
    left_out = tuple(
        one
        for one in fitting
        if (one.why == (matches.GOING_ON,) and one.at < len(one.source.lines) - _WENT_ON_LINES)
        or (not brief and one.weight == WEIGHTS["bare"] and not knowledge.kinds[one.kind].stops)
    )
    skipped = set(map(id, left_out))
    found = [one.as_kind(known.kind_of(one)) for one in fitting if id(one) not in skipped]
    if (at := known.wrong_values()) is not None:
        hard = WEIGHTS["hard"]
        found.append(Candidate("gpu-p2p-corrupt", hard, at, None, lines[at].text, log.source))
    found = _with_first_of_chains(found)
    raised = ((one.source.order, one.raised.at, one.kind) for one in fitting if one.raised)
    explained = {(order, at): knowledge.kinds[kind].echo for order, at, kind in raised}
    for text in texts:
        found += _of_unknown_exceptions(text, explained, knowledge, known)
    found += _of_called_program(texts, knowledge, known)
    found = _with_survived_weights(_without_cut(found), lines)
    for text in texts[:-1]:
        found += _of_exit_signs(exit_codes.find(text.lines, text.framed), text, known)
    found += _of_exit_signs(exits, log, known)
    found += _of_exit_status(evidence, known)
    found, outlived = _apart_outlived(found, lines)
    return Collected(
        texts, [*found, *_beside_log(evidence, texts)], exits, left_out, tuple(outlived)
    )


def _beside_log(evidence: Evidence, texts: Sequence[matches.Text]) -> Iterator[Candidate]:
    """Yield what others than the job know of its end, and what decides."""

    def known(kind: str, line: str, rank: int | None, by: str) -> Candidate:
        return Candidate(kind, DECIDES, -1, rank, line, Source(by, LOG + 1))

    hang = evidence.hang
    if evidence.unkillable:
        left = f"processes: {evidence.unkillable} could not be ended"
        yield known("process-unkillable", hang.line if hang else "", hang and hang.rank, left)
    elif evidence.keeper:  # the output is incomplete, and the ranks report only echoes
        yield known("keeper-killed", evidence.keeper, None, "the keeper's end")
    elif hang is not None:
        yield known(hang.kind, hang.line, hang.rank, hang.known_from)
    elif evidence.reader_gone:
        for text in texts:
            for at, line in enumerate(text.lines):
                if _BROKEN_PIPE in line.text:
                    one = Candidate(_OWN, DECIDES, at, line.rank, line.text, text.source)
                    yield one.as_kind("output-reader-gone")


def _error_files(failures: Sequence[RankFailure], log: matches.Text) -> Iterator[matches.Text]:
    """Yield the text of each rank's error file, a traceback, the earliest first."""
    ordered = sorted(failures, key=lambda one: (one.time_s is None, one.time_s or 0.0))
    for order, failure in enumerate(ordered, -len(ordered)):
        name = "error file" if failure.rank is None else f"error file of rank {failure.rank}"
        traceback, message = (
            [Line(0, failure.rank, row, row) for row in text.splitlines()]
            for text in (failure.traceback, failure.message)
        )
        if not _states_exception(traceback):
            traceback += message
        raised = []
        if failure.type and message and not _states_exception(traceback):  # an unusual name
            rows = tuple(range(len(traceback) - len(message), len(traceback)))
            raised = [
                Raised(rows[0], failure.rank, failure.type, rows, failure.message, headed=True)
            ]
        if traceback:
            bases = {failure.type: failure.bases}
            yield matches.Text(name, traceback, order, more=raised, log=log, bases=bases)


def _states_exception(lines: Sequence[Line]) -> bool:
    return any(one.type for one in tracebacks.find(lines).raised)


def _with_first_of_chains(found: Sequence[Candidate]) -> list[Candidate]:
    """Limit each weight to that of the known failure that was being handled at the raise."""
    first: dict[tuple[int, int], float] = {}  # source and chain -> weight
    for one in sorted(found, key=lambda one: one.position):
        if one.raised is not None and one.weight >= WEIGHTS["cause"]:
            first.setdefault((one.source.order, one.raised.chain), one.weight)
    weighed = []
    for one in found:
        if one.raised is not None and one.raised.link == "context":
            limit = first.get((one.source.order, one.raised.chain), one.weight)
            one = replace(one, weight=min(one.weight, limit))
        weighed.append(one)
    return weighed


def _of_exit_signs(
    exits: exit_codes.Exits, text: matches.Text, known: refinements.KindRefinement
) -> Iterator[Candidate]:
    """Yield the meanings of the exit codes and signals that lines report."""
    for sign in exits.signs:
        words = " ".join(line.text for line in text.lines[sign.at : sign.at + 2])
        one = Candidate(
            sign.kind, sign.weight, sign.at, sign.rank, words, text.source, "exit code",
            explains=_OF_A_CRASH if sign.is_crash else frozenset(),
        )  # fmt: skip
        yield one.as_kind(known.of_signal(one))


def _of_exit_status(evidence: Evidence, known: refinements.KindRefinement) -> Iterator[Candidate]:
    """Yield what the launcher's exit status means."""
    # torchrun returns 1 whatever happened.
    code = evidence.exit_code
    if evidence.exited and code and not signal_of(code):
        code = 1  # a status that the script chose
    if code not in (None, 1) and (meant := exit_codes.kind_of(code)):
        kind, weight = meant
        source = Source(f"exit status {evidence.exit_code}", LOG + 1)
        one = Candidate(kind, weight - 2, -1, None, "", source, "exit code")
        one = one.as_kind(known.of_signal(one))
        unnamed = one.kind == "ended-by-signal"  # no other kind leaves open which signal it was
        yield replace(one, text=f"ended by {name_of(signal_of(code))}") if unnamed else one


def _of_unknown_exceptions(
    text: matches.Text,
    explained: Mapping[tuple[int, int], bool],
    knowledge: Knowledge,
    known: refinements.KindRefinement,
) -> Iterator[Candidate]:
    """Yield one candidate for each chain of exceptions that no sign fits.

    Args:
        text: the log or an error file.
        explained: source and line of each exception that a sign fits -> whether as an echo, which
            explains none that was being handled when it came.
        knowledge: the meanings of classes and phrases of exceptions.
        known: facts that may change the meaning.
    """
    chains: dict[int, list[Raised]] = {}
    for item in text.raised:
        chains.setdefault(item.chain, []).append(item)
    for chain in chains.values():
        root = _root_of_chain(chain)
        echoes = [explained.get((text.source.order, item.at)) for item in chain]
        if not (False in echoes or echoes[chain.index(root)]) and _is_read(chain[0]):
            yield _of_unknown(root, text, knowledge, known)


def _of_unknown(
    root: Raised, text: matches.Text, knowledge: Knowledge, known: refinements.KindRefinement
) -> Candidate:
    """Return the candidate for an exception that no sign fits."""
    kind, weight = _by_class(root, knowledge)
    outside = outside_faults.row_of(root, knowledge.outside) if kind not in _NO_CAUSE else None
    kind = outside.before if outside else kind
    why: tuple[str, ...] = ()
    if not root.type or root.is_thrown:
        why = ("the traceback is cut before its exception",)
    if root.background or matches.goes_on(root, text.lines):
        weight, why = WEIGHTS["hint"], ("the process went on after it",)
    one = Candidate(
        kind, weight, root.at, root.rank, root.text, text.source,
        by="exception", raised=root, generic=True, why=why,
    )  # fmt: skip
    return one.as_kind(outside.kind) if outside and known.has_begun(one) else one


def _of_called_program(
    texts: Sequence[matches.Text], knowledge: Knowledge, known: refinements.KindRefinement
) -> Iterator[Candidate]:
    """Yield what a program said last whose failure ended the script, if it may pass."""
    raised, log = [item for text in texts for item in text.raised], texts[-1]
    called = next((item for item in raised if item.name == "CalledProcessError"), None)
    if called is None or not all(map(_is_wrapper, raised)):
        return
    before = log.lines[: called.at] if called in log.raised else log.lines
    at = last_words.of_rank(before, called.rank, 0, log.framed | log.by_row.keys())
    if at is not None:
        said = Raised(at, called.rank, "", (at,), log.lines[at].text)
        if row := outside_faults.row_of(said, knowledge.outside):
            one = Candidate(
                row.before, USER, at, said.rank, said.text, log.source, "its last words"
            )
            yield one.as_kind(row.kind) if known.has_begun(one) else one


def _without_cut(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates except cut tracebacks whose message stands in the next line.

    The message is then known, and only the exception's name is missing.
    """
    stated = {(one.position, one.rank) for one in found if one.weight >= WEIGHTS["bare"]}
    return [
        one
        for one in found
        if one.raised is None
        or one.raised.type
        or ((one.source.order, one.at + 1), one.rank) not in stated
    ]


def _apart_outlived(
    everything: Sequence[Candidate], lines: Sequence[Line]
) -> tuple[list[Candidate], list[Candidate]]:
    """Return the candidates, and separately those that the job outlived: they are no cause.

    An outlived line that appears again at the end counts there, unless the job has outlived it more
    than once.
    """
    over_at = (at for at in range(len(lines) - 1, -1, -1) if _OVER in lines[at].text)
    steps = progress.steps(lines, 0, next(over_at, len(lines))) if everything else []
    if not steps:
        return list(everything), []
    past = [_is_outlived(item, everything, lines, steps) for item in everything]
    forms = [
        digit_masks.of_word(lines[one.at].text) if one.in_log and _is_said(one) else None
        for one in everything
    ]
    often = Counter(
        form for form, over in zip(forms, past, strict=True) if over and form is not None
    )
    kept: list[Candidate] = []
    outlived: list[Candidate] = []
    for one, over, form in zip(everything, past, forms, strict=True):
        again = form is not None and often[form] > 1
        (outlived if over or again else kept).append(one)
    return kept, outlived


def _is_outlived(
    item: Candidate,
    everything: Sequence[Candidate],
    lines: Sequence[Line],
    steps: Sequence[progress.Step],
) -> bool:
    """Return whether a job made enough steps after a candidate's line to have outlived it.

    A few steps after a line show that the job outlived its event. A line that ends a process needs
    more steps: a process writes its buffered stdout when it ends, so a few earlier steps can stand
    after an exception.
    """
    if not item.in_log:
        return False
    at = 0 if item.kind == _NEVER_MET else item.at
    ranks = {step.rank for step in steps}
    remark = item.weight <= WEIGHTS["bare"] and item.by == "sign"
    whose = ranks if remark or item.rank is None else {item.rank}
    many = any(progress.went_on(steps, at, rank, _MANY_STEPS) for rank in ranks)
    if not many and not any(progress.went_on(steps, at, rank) for rank in whose):
        return False
    after = steps[-1].at  # the order of an error file and the log's steps is unknown
    later = (
        one for one in everything if (one.at > after if one.in_log else one.source.order > LOG)
    )
    if _is_said(item) or (many and any(one.kind != "child-failed-no-root" for one in later)):
        return True
    alike = sum(other.kind == item.kind for other in everything)
    return progress.is_written(lines, steps, at, alike * _BUFFER_BYTES)


def _is_said(item: Candidate) -> bool:
    """Return whether it rests on a line alone, not on a process's end or a traceback."""
    headed = item.raised is not None and item.raised.headed
    return not headed and item.weight < WEIGHTS["hard"] and item.by != "exit code"


def _is_read(item: Raised) -> bool:
    """Return whether it is an exception or a traceback, and not a lone frame or a stack dump.

    A line that only says "Error", such as a field of a record, does not count.
    """
    if item.type == "Error" and not item.headed and item.text.strip() == item.type:
        return False
    return bool(item.type or item.headed) or len(_FRAME.findall(item.frames)) > 1


def _root_of_chain(chain: Sequence[Raised]) -> Raised:
    """Return the exception to blame: the first of the chain that is not only control flow."""
    real = [item for item in chain if not (_is_wrapper(item) or _PASSED_ON.search(item.text))]
    real = real or list(chain)
    explained = {"context": _CONTROL_FLOW, "cause": _INNER, "original": _INNER}
    links = [*(one.link for one in real[1:]), ""]
    pairs = zip(real, links, strict=True)
    return next(item for item, link in pairs if item.name not in explained.get(link, ()))


def _is_wrapper(item: Raised) -> bool:
    return item.name in _WRAPPERS or _ENDED_ELSEWHERE.search(item.text) is not None


def _by_class(item: Raised, knowledge: Knowledge) -> tuple[str, int]:
    """Return an exception's kind and weight by its class, else by a phrase in its message."""
    if not item.type:  # a traceback without its last line
        return _OF_CUT[user_frame.of_cut(item.frames)]
    if item.is_thrown:  # a cut traceback whose last line is the `raise`
        return "user-exception", WEIGHTS["process"]
    if _is_wrapper(item):
        return _of_wrapped(item, knowledge), WEIGHTS["hint"] + 3
    if item.type == "Error" and not item.headed:  # any program may print this word
        return "user-exception", WEIGHTS["bare"]
    weight = USER if not _PASSED_ON.search(item.text) else USER - 1
    kind = knowledge.classes.get(item.name)
    if kind == "interrupted":
        return kind, WEIGHTS["process"] + 3
    if kind is None:
        text = item.text.lower()
        kind = next((k for needle, k in knowledge.phrases if says(needle, text)), None)
    return kind or "user-exception", weight


def _of_wrapped(item: Raised, knowledge: Knowledge) -> str:
    """Return the kind of a wrapper, such as Ray's, by the class of the exception that it names."""
    found = _WRAPPED.search(item.text)
    if found is None or found[1] in _WRAPPERS:
        return "child-failed-no-root"
    kinds = (sign.kind for sign in knowledge.signs if found[1] in sign.types and sign.stands_alone)
    return next(kinds, knowledge.classes.get(found[1], "child-failed-no-root"))


def _with_survived_weights(found: Sequence[Candidate], lines: Sequence[Line]) -> list[Candidate]:
    """Lower the weight of what the job survived: many lines follow before the next candidate."""
    weighed: list[Candidate] = []
    limit, later = _NO_LIMIT, len(lines) and lines[-1].number
    for one in sorted(found, key=lambda one: one.position, reverse=True):
        number = one.number
        if later - number > _GAP_LINES and number:
            far = later - number > _LONG_GAP_LINES
            limit = min(limit, _SURVIVED_LONG if far else _SURVIVED)
        later = number or later
        if one.weight > limit and one.in_log:
            why = (*one.why, "the job lived on: many lines follow")
            one = replace(one, weight=limit, why=why)
        weighed.append(one)
    return weighed
