"""Pure: the places of a log that the signs of failures fit.

This module finds all places; root_cause.py decides between them.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType

from saferun.base.phrases import says
from saferun.diagnosis.deciding.candidate import LOG, Candidate, Source
from saferun.diagnosis.reading import digit_masks, tracebacks
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised
from saferun.diagnosis.reading.tracebacks import GOES_ON
from saferun.diagnosis.signatures import WEIGHTS, Knowledge, Sign

GOING_ON = "the program says that it goes on"
_PLAIN_LOSS = 6  # what a line's weight loses if it is not part of an exception
_CONTEXT_LINES = 25  # lines of context, above a line and below it
_HITS = 60  # most lines examined for one phrase: this many first and last ones
_LAST_LINES = 3  # number of last lines, for a sign with `last`
_WARNING = re.compile(r"warning\b|^\[?w\d{3,4} |^\[w |\bw\d{3,4} \d\d:|^warn\b|\[warn|deprecat")
# The level of a line that does not report a failure: a logger's, NCCL's, glog's.
_INFORMATION = re.compile(
    r"\A(?:.{0,120}?(?<![=\w])(?:INFO|DEBUG|TRACE)\b(?!.{0,40}\b(?:ERROR|CRITICAL|FATAL)\b)"
    r"|\[?I\d{4} \d\d:|\S{0,40}\blevel=(?:info|debug)\b"
    r"|.{0,400}?\"(?:level|levelname|severity)\": ?\"(?:info|debug)\")"
)
# Lines that say nothing about a failure beside them: torchrun's about a rank that failed, its name
# for this machine and the link to its manual (no request was sent to either), wandb's lines about
# its run, and a full progress bar.
_NOT_CONTEXT = re.compile(
    r"\s{0,20}(?:(?:host|rank)\s{1,20}: |traceback : to enable|wandb:(?!.{0,40}\berror\b))"
    r"|.{0,200}(?:\b100%\||failed \(exitcode: |childfailederror:)"
)
# Exceptions whose traceback is only the launcher's that reports the failure.
_LAUNCHERS = frozenset(("ChildFailedError", "CalledProcessError"))


def is_information(line: Line) -> bool:
    """Return whether the program gave a line an information level."""
    return any(_INFORMATION.match(text) for text in (line.raw, line.text))


def _is_forwarded(lines: Sequence[Line], framed: Iterable[int]) -> bool:
    """Return whether a runner puts its own level on all output of its job, even on frames."""
    told = itertools.chain(
        (lines[row] for row in framed), (line for line in lines if " NCCL WARN " in line.text)
    )
    return any(is_information(line) for line in told)


def goes_on(item: Raised, lines: Sequence[Line]) -> bool:
    """Return whether a program continues after an exception that it only mentions in a line.

    The line, or the one below it, says that the program retries or does without.
    """
    near = lines[item.at : item.at + 2]
    return not item.headed and any(GOES_ON.search(line.text.lower()) for line in near)


def _own_faults(lines: Sequence[Line]) -> frozenset[int]:
    """Return the lines in which saferun, inside the job, reports a fault that does not end it."""
    own = (
        row
        for row, line in enumerate(lines)
        if " the job goes on" in line.text and line.text.startswith("saferun: ")
    )
    return frozenset(own)


class Text:
    """A log or a rank's error file: lines in lower case, searched as one text.

    Frames of tracebacks and saferun's messages on its own faults are not matched.

    Args:
        name: the source's name.
        lines: the source's lines.
        order: the source's order.
        more: exceptions beside those in the lines.
        log: for a rank's error file, which is written when the rank ends: the job's log. Words that
            may stand anywhere are searched in it, too, and its last lines are context of each line.
        bases: what classes of exceptions derive from, where the rank told it.
    """

    def __init__(
        self,
        name: str,
        lines: Sequence[Line],
        order: int = LOG,
        more: Sequence[Raised] = (),
        log: Text | None = None,
        bases: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self.lines = lines
        self.alike = digit_masks.of(lines)
        exceptions = tracebacks.find(lines, more).without_consequences()
        self.raised = tuple(
            replace(one, bases=bases[one.name]) if one.name in bases else one
            for one in exceptions.raised
        )
        self.source = Source(name, order, lines, self.raised)
        self.whole = "\n".join([line.text for line in lines]).lower()
        self.lower = self.whole.split("\n")
        self.framed = exceptions.framed | _own_faults(lines)
        self.by_row = {row: number for number, item in enumerate(self.raised) for row in item.rows}
        self.messages = [item.text.lower() for item in self.raised]
        rows: dict[str, list[int]] = {}  # form -> lines that differ only in digits, such as steps
        for row, form in enumerate(self.alike):
            rows.setdefault(form, []).append(row)
        self._of_shape = list(rows.values())
        shapes = [form.lower() for form in rows]
        self._shapes = "\n".join(shapes)
        self._starts = [0, *itertools.accumulate(len(shape) + 1 for shape in shapes)]
        self._launcher_rows = self._frames_of_launchers()
        self._forwarded = _is_forwarded(lines, exceptions.framed)
        self._log = log
        self._around: dict[int, str] = {}
        self._rows: dict[str, tuple[int, ...]] = {}

    def has(self, words: Iterable[str]) -> bool:
        """Return whether one of some words occurs anywhere."""
        places = (self.whole, self._log.whole) if self._log else (self.whole,)
        return any(word in place for word in words for place in places)

    def statement(self, row: int) -> str:
        """Return the message of a line's exception, or the line."""
        number = self.by_row.get(row)
        return self.lower[row] if number is None else self.messages[number]

    def is_information(self, row: int) -> bool:
        """Return whether the program itself gave a line an information level."""
        return not self._forwarded and is_information(self.lines[row])

    def rows_with(self, word: str) -> tuple[int, ...]:
        """Return the lines that contain a phrase: at most the first and last _HITS of them."""
        if word not in self._rows:
            self._rows[word] = self._search(word)
        return self._rows[word]

    def _search(self, word: str) -> tuple[int, ...]:
        bare = digit_masks.of_word(word)
        if bare not in self._shapes:
            return ()
        rows = sorted(itertools.chain.from_iterable(self._of_shapes_with(bare)))
        if bare != word:
            rows = [row for row in rows if word in self.lower[row]]
        return tuple(rows if len(rows) <= 2 * _HITS else rows[:_HITS] + rows[-_HITS:])

    def _of_shapes_with(self, bare: str) -> Iterator[list[int]]:
        """Yield the lines of every form that contains a phrase with 0 for its digits."""
        at = self._shapes.find(bare)
        while at >= 0:
            shape = bisect_right(self._starts, at) - 1
            yield self._of_shape[shape]
            at = self._shapes.find(bare, self._starts[shape + 1])

    def _frames_of_launchers(self) -> set[int]:
        """Return the lines of the launchers' own tracebacks."""
        rows: set[int] = set()
        for item in self.raised:
            row = item.at if item.name in _LAUNCHERS else 0
            while (row := row - 1) in self.framed:
                rows.add(row)
        return rows

    def innermost(self, row: int) -> str:
        """Return the last frame of an exception's traceback; "" if there is none."""
        number = self.by_row.get(row)
        frames = self.raised[number].frames.lower() if number is not None else ""
        at = frames.rfind('file "')
        return frames[at:] if at >= 0 else ""

    def around(self, row: int) -> str:
        """Return the lines around a line, with the traceback if it is an exception's line.

        The line itself is returned as printed: torch's loggers name the source file in it.
        """
        if row not in self._around:
            text = self._context(row)
            if self._log:
                text += "\n" + self._log.end
            self._around[row] = f"{self.own(row)}\n{text}" if row in self.by_row else text
        return self._around[row]

    @cached_property
    def end(self) -> str:
        """The last lines."""
        return self._context(len(self.lower))

    def _context(self, row: int) -> str:
        begin, end = max(0, row - _CONTEXT_LINES), row + _CONTEXT_LINES
        return "\n".join(
            line if at != row else re.sub(r"\[rank\d{1,6}\]: ", "", self.lines[row].raw.lower())
            for at, line in enumerate(self.lower[begin:end], begin)
            if at == row
            or not (at in self._launcher_rows or _WARNING.search(line) or _NOT_CONTEXT.match(line))
        )

    def own(self, row: int) -> str:
        """Return an exception's traceback and message, or only the line."""
        number = self.by_row.get(row)
        if number is None:
            return self.lower[row]
        return f"{self.raised[number].frames.lower()}\n{self.messages[number]}"

    def above(self, row: int) -> str:
        """Return the lines above a line."""
        return "\n".join(self.lower[max(0, row - _CONTEXT_LINES) : row])


def match(knowledge: Knowledge, text: Text) -> list[Candidate]:
    """Return every place that a sign fits; where several fit, the first sign counts."""
    taken: set[tuple[bool, int]] = set()
    found: list[Candidate] = []
    for sign in knowledge.signs:
        for row in _places(sign, text):
            number = text.by_row.get(row)
            key = (number is not None, row if number is None else number)
            if key not in taken and not against(sign, text, row):
                found.append(_candidate(sign, text, row, number))
                if found[-1].weight != WEIGHTS["bare"]:
                    taken.add(key)
    return found


def _places(sign: Sign, text: Text) -> Iterator[int]:
    """Yield the lines that contain a sign's phrase, in no particular order."""
    if sign.types:
        for item in text.raised:
            if item.name in sign.types:
                yield item.at
    for needle in sign.says:
        for row in text.rows_with(max(needle, key=len)):  # the longest part is probably the rarest
            if says(needle, text.statement(row)):
                yield row


def against(sign: Sign, text: Text, row: int) -> str:
    """Return the name of the first condition of a sign that a place does not meet; "" for none.

    Args:
        sign: the sign.
        text: the log.
        row: the line that contains the sign's phrase.
    """
    if row in text.by_row:
        if sign.only == "line":
            return "line"
    elif row in text.framed:
        return "frame"
    elif not sign.states and text.is_information(row):
        return "information"
    if sign.last and row < len(text.lines) - _LAST_LINES:
        return "last"
    if sign.innermost and not any(word in text.innermost(row) for word in sign.innermost):
        return "innermost"
    if sign.own and not any(word in text.own(row) for word in sign.own):
        return "own"
    if any(word in text.own(row) for word in sign.not_own):
        return "not_own"
    if any(word in text.above(row) for word in sign.not_above):
        return "not_above"
    around = text.around(row) if sign.near or sign.not_near or sign.doing else ""
    if sign.doing and not re.search(sign.doing, around):
        return "doing"
    if sign.near and not any(word in around for word in sign.near):
        return "near"
    if any(word in around for word in sign.not_near):
        return "not_near"
    if sign.anywhere and not text.has(sign.anywhere):
        return "anywhere"
    return "not_anywhere" if text.has(sign.not_anywhere) else ""


def _candidate(sign: Sign, text: Text, row: int, number: int | None) -> Candidate:
    item = None if number is None else text.raised[number]
    if item is None:
        rank = text.lines[row].rank
        body = "".join(line.text for line in text.lines[row : row + 4])
        weight, why = _of_a_line(sign, text.lower[row])
    else:
        rank, body, weight, why = item.rank, item.text, sign.weight, ""
        if item.background:
            weight, why = min(weight, WEIGHTS["hint"] + 1), "the process went on after it"
        if goes_on(item, text.lines):
            weight, why = min(weight, WEIGHTS["hint"] - 1), GOING_ON
    return Candidate(
        sign.kind, weight, row, rank, body, text.source,
        raised=item, explains=sign.explains, why=(why,) if why else (), sign=sign,
    )  # fmt: skip


def _of_a_line(sign: Sign, lower: str) -> tuple[int, str]:
    """Return a sign's weight in a line without an exception, and why it is lower."""
    if _WARNING.search(lower) and not sign.warned:
        return min(sign.weight, WEIGHTS["hint"]), "a warning"
    if GOES_ON.search(lower):
        return min(sign.weight, WEIGHTS["hint"]), GOING_ON
    if sign.only == "exception":
        return WEIGHTS["bare"], "the message stands without its exception"
    if WEIGHTS["echo+"] < sign.weight < WEIGHTS["hard"]:
        return sign.weight - _PLAIN_LOSS, "a line outside an exception"
    return sign.weight, ""
