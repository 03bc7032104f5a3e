"""Pure: the signs of each kind of failure, and its texts for people.

`parse` turns the document of knowledge/failures.yaml into values; matches.py finds the places of a
log that a sign fits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.errors import SaferunError
from saferun.knowledge import loader

VERDICTS = ("retry", "mitigate", "stop-user", "stop-hardware", "unknown")
# The highest weight in one log wins. An exception in the user's own code weighs USER and wins over
# lower weights. `bare`: an exception's message without the exception, as in fragments of a log.
WEIGHTS = {
    "hard": 90, "cause": 70, "soft": 52, "echo+": 33, "echo": 30,
    "process": 20, "bare": 16, "hint": 10,
}  # fmt: skip
USER = 50
DECIDES = 100  # of what is known beside the log and decides whatever that says

_kept: list[Knowledge] = []  # at most one

Needle = tuple[str, ...]  # a phrase: parts in lower case that follow each other


class Kind(NamedTuple):
    """One kind of failure, and its texts for people."""

    name: str
    group: str
    verdict: str
    mitigations: tuple[str, ...]
    explanation: str
    advice: str
    references: tuple[str, ...]
    numbers: str  # regex with named groups; "" if a kind has no numbers
    detail: str  # a text with these numbers
    waits: bool  # the failure passes by itself after a while, so waiting is part of the mitigation
    echo: bool = False  # seen by survivors of a failure elsewhere: the cause is on another node

    @property
    def stops(self) -> bool:
        """Return whether another attempt would fail in the same way."""
        return self.verdict.startswith("stop")


class Sign(NamedTuple):
    """One sign of a kind in a log."""

    kind: str
    says: tuple[Needle, ...]
    types: frozenset[str]
    near: tuple[str, ...]
    doing: str  # a pattern in lower case; "" for none
    not_near: tuple[str, ...]
    own: tuple[str, ...]
    not_own: tuple[str, ...]
    not_above: tuple[str, ...]
    innermost: tuple[str, ...]
    anywhere: tuple[str, ...]
    not_anywhere: tuple[str, ...]
    weight: int
    only: str  # "", "exception" or "line"
    warned: bool  # a line of a warning counts in full
    last: bool  # fits only in the last lines of the log
    explains: frozenset[str]  # kinds that are its consequences, whatever their weight

    @property
    def states(self) -> bool:
        """Return whether it decides even in an information line: it states an end or has `last`."""
        return self.warned or self.last or self.weight >= WEIGHTS["hard"]

    @property
    def stands_alone(self) -> bool:
        """Return whether a line that it fits is a cause without any context."""
        around = self.near or self.doing or self.own or self.innermost or self.anywhere
        return self.weight >= WEIGHTS["cause"] and not around and self.only != "exception"


class Outside(NamedTuple):
    """One row of outside_faults.yaml. Empty conditions always hold."""

    kind: str
    before: str  # the kind before the first steps
    type: str  # a pattern
    says: str  # a pattern
    path: str
    not_own: bool


# Keys of a sign with words of which one must (or must not) occur in some place.
_WORDS = (
    *("near", "not_near", "own", "not_own", "not_above", "innermost"),
    *("anywhere", "not_anywhere"),
)


class Knowledge(NamedTuple):
    """All that is known about failures."""

    kinds: Mapping[str, Kind]
    signs: tuple[Sign, ...]
    classes: Mapping[str, str]  # class of an exception -> kind
    phrases: tuple[tuple[Needle, str], ...]  # phrase -> kind, for exceptions of a general class
    numbers: Mapping[str, Mapping[int, str]]  # library -> number of an error -> its name
    outside: tuple[Outside, ...] = ()  # the faults of the world outside the job


def load() -> Knowledge:
    """Return how failures look and what they mean (failures.yaml, outside_faults.yaml)."""
    if _kept:
        return _kept[0]
    known, table = parse(loader.load("failures.yaml")), loader.load("outside_faults.yaml")
    rows = tuple(_outside(body, table["families"], known.kinds) for body in table["rows"])
    return known._replace(outside=rows)


def keep() -> None:
    """Have it in memory from now on."""
    _kept[:] = [load()]


def parse(document: Mapping[str, Any]) -> Knowledge:
    """Turn the document into values.

    Raises:
        SaferunError: a kind, verdict, weight or key is unknown, or a key is missing.
    """
    kinds = {name: _kind(name, body) for name, body in document["kinds"].items()}
    signs = tuple(_sign(body, kinds) for body in document["signs"])
    classes = {cls: kind for kind, names in document["classes"].items() for cls in names}
    phrases = tuple(
        (needle(text), kind) for kind, texts in document["phrases"].items() for text in texts
    )
    for name in [*classes.values(), *(kind for _, kind in phrases)]:
        _known(name, kinds)
    numbers = {
        definer: {number: name for name, all_of_it in names.items() for number in all_of_it}
        for definer, names in document["numbers"].items()
    }
    return Knowledge(kinds, signs, classes, phrases, numbers)


def _kind(name: str, body: Mapping[str, Any]) -> Kind:
    where = f"kind {name}"
    _check_keys(body, Kind._fields, where)
    return Kind(
        name=name,
        group=_text(body, "group", where),
        verdict=_one_of(VERDICTS, _text(body, "verdict", where), "verdict", where),
        mitigations=_texts(body, "mitigations"),
        explanation=_text(body, "explanation", where),
        advice=_text(body, "advice", where),
        references=_texts(body, "references"),
        numbers=str(body.get("numbers", "")),
        detail=str(body.get("detail", "")),
        waits=body.get("waits", False) is True,
        echo=body.get("echo", False) is True,
    )


def _sign(body: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Sign:
    kind = _known(_text(body, "kind", "a sign"), kinds)
    where = f"a sign of {kind}"
    _check_keys(body, Sign._fields, where)
    return Sign(
        kind=kind,
        says=tuple(needle(text) for text in _phrases(body)),
        types=frozenset(_texts(body, "types")),
        doing=_doing(_lower_texts(body, "doing")),
        **{key: _lower_texts(body, key) for key in _WORDS},
        weight=WEIGHTS[_one_of(WEIGHTS, str(body.get("weight", "cause")), "weight", where)],
        only=str(body.get("only", "")),
        warned=body.get("warned", False) is True,
        last=body.get("last", False) is True,
        explains=frozenset(_known(name, kinds) for name in _texts(body, "explains")),
    )


def _outside(
    body: Mapping[str, Any], families: Mapping[str, Any], kinds: Mapping[str, Kind]
) -> Outside:
    """Return a row of outside_faults.yaml, its numbers as patterns."""
    _check_keys(body, (*Outside._fields, *families), "a row of outside_faults.yaml")
    kind = _known(body["kind"], kinds) if "kind" in body else ""
    says = list(_texts(body, "says"))
    for name, family in families.items():
        if numbers := list(map(str, body.get(name, ()))):
            says += (form.replace("N", "|".join(numbers)) for form in family["forms"])
            says += (words for words, of in family["names"].items() if {*map(str, of)} & {*numbers})
    return Outside(
        kind, _known(body["before"], kinds) if "before" in body else kind,
        str(body.get("type", "")), "|".join(says),
        body.get("path", ""), body.get("not_own", False),
    )  # fmt: skip


def _check_keys(body: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for key in body:
        if key not in known:
            raise SaferunError(f"unknown key `{key}`", where=where)


def _text(body: Mapping[str, Any], key: str, where: str) -> str:
    if key not in body:
        raise SaferunError(f"missing key `{key}`", where=where)
    return str(body[key])


def _texts(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(map(str, body.get(key, ())))


def _phrases(body: Mapping[str, Any]) -> Sequence[str]:
    """Return a sign's phrases, from a list or from lists by the releases that print them."""
    says = body.get("says", ())
    groups = says.values() if isinstance(says, Mapping) else (says,)
    return [str(text) for group in groups for text in group]


def _lower_texts(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(map(str.lower, _texts(body, key)))


def _doing(phrases: Sequence[str]) -> str:
    """Return a pattern for words about what a job does, but not in a path or a setting's name."""
    words = "|".join(map(re.escape, phrases))
    return rf"(?<![\w/-])(?:{words})(?![/:=])" if words else ""


def _one_of(known: Collection[str], value: str, what: str, where: str) -> str:
    if value not in known:
        raise SaferunError(f"unknown {what} `{value}`", where=where)
    return value


def _known(name: str, kinds: Mapping[str, Kind]) -> str:
    return _one_of(kinds, name, "kind", "knowledge/failures.yaml")


def needle(text: str) -> Needle:
    """Return the parts of a phrase, which are separated by ` ... `."""
    return tuple(text.lower().split(" ... "))
