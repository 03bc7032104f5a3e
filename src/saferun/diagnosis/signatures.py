"""Pure: what is known about failures, and where it fits a log.

`parse` turns the document of knowledge/failures.yaml into values; `match` finds every place of a
log that one of its signs fits. Nothing here decides between the places: classify.py does.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.diagnosis.log_reader import Line
from saferun.diagnosis.tracebacks import GOES_ON, Raised
from saferun.errors import SaferunError

VERDICTS = ("retry", "mitigate", "stop-user", "stop-hardware", "unknown")
# Who wins in one log. An exception of the user's own weighs USER: what is below gives way to it.
# `bare`: an exception's words without an exception; what is left where a log was cut to pieces.
WEIGHTS = {
    "hard": 90, "cause": 70, "soft": 52, "echo+": 33, "echo": 30,
    "process": 20, "bare": 16, "hint": 10,
}  # fmt: skip
USER = 50
_PLAIN_LOSS = 6  # a line that is not part of an exception counts less than one that is
_CONTEXT_LINES = 25
_HITS = 60  # of one word: the first and the last ones are looked at
_LAST_LINES = 3
_LISTS = (
    *("near", "not_near", "own", "not_own", "not_above"),
    *("innermost", "anywhere", "not_anywhere"),
)
_NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))
_WARNING = re.compile(r"warning\b|^\[?w\d{3,4} |^\[w |\bw\d{3,4} \d\d:|^warn\b|\[warn|deprecat")

Needle = tuple[str, ...]  # lower-case parts that follow each other


class Kind(NamedTuple):
    """One kind of failure, and what people are told about it."""

    name: str
    group: str
    verdict: str
    mitigations: tuple[str, ...]
    explanation: str
    advice: str
    references: tuple[str, ...]
    numbers: str  # regex with named groups; "" where a kind has no numbers
    detail: str  # filled from them
    waits: bool  # waiting is part of the mitigation: it passes by itself, in a while

    @property
    def stops(self) -> bool:
        """Whether another attempt would fail the same way."""
        return self.verdict.startswith("stop")


class Sign(NamedTuple):
    """How a kind shows itself."""

    kind: str
    says: tuple[Needle, ...]
    types: frozenset[str]
    near: tuple[str, ...]
    not_near: tuple[str, ...]
    own: tuple[str, ...]
    not_own: tuple[str, ...]
    not_above: tuple[str, ...]
    innermost: tuple[str, ...]
    anywhere: tuple[str, ...]
    not_anywhere: tuple[str, ...]
    weight: int
    only: str  # "", "exception" or "line"
    warned: bool  # counts in full where a warning says it
    last: bool  # only among the last lines of the log


class Knowledge(NamedTuple):
    """All that is known about failures."""

    kinds: Mapping[str, Kind]
    signs: tuple[Sign, ...]
    classes: Mapping[str, str]  # exception's class -> kind
    phrases: tuple[tuple[Needle, str], ...]  # -> kind, for exceptions of no telling class


class Match(NamedTuple):
    """A place of the log that a sign fits."""

    kind: str
    weight: int
    at: int  # index of the deciding line
    rank: int | None
    raised: Raised | None
    text: str  # the exception's message, or the line and the ones that follow it


def load(environ: Mapping[str, str] | None = None) -> Knowledge:
    """Return how failures look and what they mean (knowledge/failures.yaml).

    Args:
        environ: for the user's cache directory; the process's own where left out.
    """
    from saferun.knowledge import loader

    return parse(loader.load_failures(environ))


def parse(document: Mapping[str, Any]) -> Knowledge:
    """Turn the document into values.

    Raises:
        SaferunError: a sign of an unknown kind, an unknown verdict, weight or key.
    """
    kinds = {name: _kind(name, body) for name, body in document["kinds"].items()}
    signs = tuple(_sign(body, kinds) for body in document["signs"])
    classes = {cls: kind for kind, all_ in document["classes"].items() for cls in all_}
    phrases = tuple(
        (_needle(text), kind) for kind, all_ in document["phrases"].items() for text in all_
    )
    for name in [*classes.values(), *(kind for _, kind in phrases)]:
        _known(name, kinds)
    return Knowledge(kinds, signs, classes, phrases)


def _kind(name: str, body: Mapping[str, Any]) -> Kind:
    if body["verdict"] not in VERDICTS:
        raise SaferunError(f"unknown verdict `{body['verdict']}`", where=f"kind {name}")
    known = {
        "mitigations": (),
        "references": (),
        "numbers": "",
        "detail": "",
        "waits": False,
        **body,
    }
    known["mitigations"] = tuple(known["mitigations"])
    known["references"] = tuple(known["references"])
    try:
        return Kind(name=name, **known)
    except TypeError as error:
        raise SaferunError(f"wrong keys: {error}", where=f"kind {name}") from None


def _sign(body: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Sign:
    known: dict[str, Any] = {"only": "", "warned": False, "last": False, "weight": "cause", **body}
    known["weight"] = WEIGHTS[known["weight"]]
    known["says"] = tuple(_needle(text) for text in known.get("says", ()))
    known["types"] = frozenset(known.get("types", ()))
    for key in _LISTS:
        known[key] = tuple(text.lower() for text in known.get(key, ()))
    _known(known["kind"], kinds)
    try:
        return Sign(**known)
    except TypeError as error:
        raise SaferunError(f"wrong keys: {error}", where=f"a sign of {known['kind']}") from None


def _known(name: str, kinds: Mapping[str, Kind]) -> None:
    if name not in kinds:
        raise SaferunError(f"unknown kind `{name}`", where="knowledge/failures.yaml")


def _needle(text: str) -> Needle:
    return tuple(text.lower().split(" ... "))


def says(needle: Needle, text: str) -> bool:
    """Return whether a text (lower case) holds a needle's parts one after the other."""
    at = 0
    for part in needle:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def _is_warning(text: str) -> bool:
    return _WARNING.search(text) is not None


def goes_on(item: Raised, lines: Sequence[Line]) -> bool:
    """Return whether an exception that a line only mentions is one that the program deals with:
    the line, or the one below it, says that it tries again or goes on without."""
    if item.headed:
        return False
    return any(GOES_ON.search(line.text.lower()) for line in lines[item.at : item.at + 2])


# What tells nothing of the failure that it stands beside: torchrun's words for this machine and for
# its manual, which are no address that anything was sent to, and a bar that came to its end.
_BESIDE = re.compile(r"\s*(?:host\s{1,20}: |traceback : to enable)|.{0,200}\b100%\|")
# Only the traceback of the launcher that passes it on.
_LAUNCHERS = frozenset(("ChildFailedError", "CalledProcessError"))


class _Text:
    """A log's lines in lower case, searched as one."""

    def __init__(
        self, lines: Sequence[Line], raised: Sequence[Raised], framed: frozenset[int]
    ) -> None:
        self.lower = [line.text.lower() for line in lines]
        self.whole = "\n".join(self.lower)
        self.lines = lines
        self.framed = framed
        self.raised = raised
        self.by_row = {row: number for number, item in enumerate(raised) for row in item.rows}
        self.messages = [item.text.lower() for item in raised]
        alike: dict[str, list[int]] = {}  # lines that differ in numbers alone, as steps do
        for row, shape in enumerate(self.whole.translate(_NO_DIGITS).split("\n")):
            alike.setdefault(shape, []).append(row)
        self._shapes = "\n".join(alike)
        self._alike = list(alike.values())
        self._starts = [0, *itertools.accumulate(len(shape) + 1 for shape in alike)]
        self._beside = self._launchers()
        self._around: dict[int, str] = {}
        self._rows: dict[str, tuple[int, ...]] = {}

    def rows_with(self, word: str) -> tuple[int, ...]:
        """Return the lines that hold a word: at most the first and the last _HITS of them."""
        if word not in self._rows:
            self._rows[word] = self._search(word)
        return self._rows[word]

    def _search(self, word: str) -> tuple[int, ...]:
        bare = word.translate(_NO_DIGITS)
        rows = sorted(itertools.chain.from_iterable(self._of_shapes_with(bare)))
        if bare != word:
            rows = [row for row in rows if word in self.lower[row]]
        return tuple(rows if len(rows) <= 2 * _HITS else rows[:_HITS] + rows[-_HITS:])

    def _of_shapes_with(self, bare: str) -> Iterator[list[int]]:
        """Yield the lines of every shape that holds a word without its digits."""
        at = self._shapes.find(bare)
        while at >= 0:
            shape = bisect_right(self._starts, at) - 1
            yield self._alike[shape]
            at = self._shapes.find(bare, self._starts[shape + 1])

    def _launchers(self) -> set[int]:
        """Return the lines of launchers' own tracebacks."""
        rows: set[int] = set()
        for item in self.raised:
            row = item.at if item.name in _LAUNCHERS else 0
            while (row := row - 1) in self.framed:
                rows.add(row)
        return rows

    def innermost(self, row: int) -> str:
        """Return the last frame of an exception's traceback, "" where there is none."""
        number = self.by_row.get(row)
        frames = self.raised[number].frames.lower() if number is not None else ""
        at = frames.rfind('file "')
        return frames[at:] if at >= 0 else ""

    def around(self, row: int) -> str:
        """Return what stands around a line, with its traceback where it is an exception's."""
        if row not in self._around:
            begin, end = max(0, row - _CONTEXT_LINES), row + _CONTEXT_LINES
            told = (
                line
                for at, line in enumerate(self.lower[begin:end], begin)
                if at not in self._beside and not _is_warning(line) and not _BESIDE.match(line)
            )
            text = "\n".join(told)
            self._around[row] = f"{self.own(row)}\n{text}" if row in self.by_row else text
        return self._around[row]

    def own(self, row: int) -> str:
        """Return an exception's traceback and message, or the line alone."""
        number = self.by_row.get(row)
        if number is None:
            return self.lower[row]
        return f"{self.raised[number].frames.lower()}\n{self.messages[number]}"

    def above(self, row: int) -> str:
        """Return the lines that stand above one."""
        return "\n".join(self.lower[max(0, row - _CONTEXT_LINES) : row])


def match(
    knowledge: Knowledge,
    lines: Sequence[Line],
    raised: Sequence[Raised],
    framed: frozenset[int] = frozenset(),
) -> list[Match]:
    """Return every place that a sign fits, one sign a place.

    Args:
        knowledge: the signs.
        lines: the log's.
        raised: the exceptions found in them.
        framed: indices of lines that are a traceback's quoted source, which say nothing.
    """
    text = _Text(lines, raised, framed)
    taken: set[tuple[bool, int]] = set()
    found: list[Match] = []
    for sign in knowledge.signs:
        if any(word in text.whole for word in sign.not_anywhere):
            continue
        if sign.anywhere and not any(word in text.whole for word in sign.anywhere):
            continue
        for row in _places(sign, text):
            number = text.by_row.get(row)
            key = (number is not None, row if number is None else number)
            if key not in taken and _fits(sign, text, row):
                found.append(_match(sign, text, row, number))
                if found[-1].weight != WEIGHTS["bare"]:
                    taken.add(key)
    return found


def _places(sign: Sign, text: _Text) -> Iterator[int]:
    """Yield the lines that hold what a sign says, in no particular order."""
    if sign.types:
        for item in text.raised:
            if item.name in sign.types:
                yield item.at
    for needle in sign.says:
        for row in text.rows_with(max(needle, key=len)):  # its rarest part, most likely
            number = text.by_row.get(row)
            if number is not None:
                if sign.only != "line" and says(needle, text.messages[number]):
                    yield row
            elif row not in text.framed and says(needle, text.lower[row]):
                yield row


def _fits(sign: Sign, text: _Text, row: int) -> bool:
    if sign.last and row < len(text.lines) - _LAST_LINES:
        return False
    if sign.innermost and not any(word in text.innermost(row) for word in sign.innermost):
        return False
    if sign.own and not any(word in text.own(row) for word in sign.own):
        return False
    if any(word in text.own(row) for word in sign.not_own):
        return False
    if any(word in text.above(row) for word in sign.not_above):
        return False
    if not (sign.near or sign.not_near):
        return True
    around = text.around(row)
    if sign.near and not any(word in around for word in sign.near):
        return False
    return not any(word in around for word in sign.not_near)


def _match(sign: Sign, text: _Text, row: int, number: int | None) -> Match:
    if number is not None:
        item = text.raised[number]
        weight = min(sign.weight, WEIGHTS["hint"] + 1) if item.background else sign.weight
        if goes_on(item, text.lines):
            weight = min(weight, WEIGHTS["hint"] - 1)
        return Match(sign.kind, weight, row, item.rank, item, item.text)
    weight = sign.weight
    if (_is_warning(text.lower[row]) and not sign.warned) or GOES_ON.search(text.lower[row]):
        weight = min(weight, WEIGHTS["hint"])
    elif sign.only == "exception":
        weight = WEIGHTS["bare"]
    elif WEIGHTS["echo+"] < weight < WEIGHTS["hard"]:
        weight -= _PLAIN_LOSS
    body = "".join(line.text for line in text.lines[row : row + 4])
    return Match(sign.kind, weight, row, text.lines[row].rank, None, body)
