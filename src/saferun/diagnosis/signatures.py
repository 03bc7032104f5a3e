"""Pure: how each kind of failure shows itself, and what people read about it.

`parse` turns the document of knowledge/failures.yaml into values; matches.py finds the places of a
log that a sign fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from saferun.errors import SaferunError
from saferun.knowledge import loader

VERDICTS = ("retry", "mitigate", "stop-user", "stop-hardware", "unknown")
# What weighs most in one log wins. An exception of the user's own weighs USER and wins over less.
# `bare`: the message of an exception without its exception, as in fragments of a log.
WEIGHTS = {
    "hard": 90, "cause": 70, "soft": 52, "echo+": 33, "echo": 30,
    "process": 20, "bare": 16, "hint": 10,
}  # fmt: skip
USER = 50

_kept: list[Knowledge] = []  # one, or none

Made = TypeVar("Made")
Needle = tuple[str, ...]  # a phrase: lower-case parts that follow each other


class Kind(NamedTuple):
    """One kind of failure, and what people read about it."""

    name: str
    group: str
    verdict: str
    explanation: str
    advice: str
    references: tuple[str, ...] = ()
    mitigations: tuple[str, ...] = ()
    numbers: str = ""  # regex with named groups; "" where a kind has no numbers
    detail: str = ""  # filled from them
    waits: bool = False  # waiting is part of the mitigation: it passes by itself, in a while
    echo: bool = False  # what survivors of a failure elsewhere see: the cause is on another node

    @property
    def stops(self) -> bool:
        """Whether another attempt would fail the same way."""
        return self.verdict.startswith("stop")


class Sign(NamedTuple):
    """How a kind shows itself."""

    kind: str
    says: tuple[Needle, ...] = ()
    types: frozenset[str] = frozenset()
    # Words (lower case) of which one is, or is not, in some place.
    near: tuple[str, ...] = ()
    not_near: tuple[str, ...] = ()
    own: tuple[str, ...] = ()
    not_own: tuple[str, ...] = ()
    not_above: tuple[str, ...] = ()
    innermost: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()
    not_anywhere: tuple[str, ...] = ()
    doing: str = ""  # a pattern of lower case; "" for none
    weight: int = WEIGHTS["cause"]
    only: str = ""  # "", "exception" or "line"
    warned: bool = False  # a warning's line counts in full
    last: bool = False  # only among the last lines of the log
    explains: frozenset[str] = frozenset()  # kinds that are its consequence, whatever they weigh

    @property
    def states(self) -> bool:
        """Whether it decides in a line of information, too: it states an end, or the last lines."""
        return self.warned or self.last or self.weight >= WEIGHTS["hard"]

    @property
    def stands_alone(self) -> bool:
        """Whether a line that it fits needs nothing around it to be the cause."""
        around = self.near or self.doing or self.own or self.innermost or self.anywhere
        return self.weight >= WEIGHTS["cause"] and not around and self.only != "exception"


class Knowledge(NamedTuple):
    """All that is known about failures."""

    kinds: Mapping[str, Kind]
    signs: tuple[Sign, ...]
    classes: Mapping[str, str]  # exception's class -> kind
    phrases: tuple[tuple[Needle, str], ...]  # -> kind, for exceptions of a general class
    numbers: Mapping[str, Mapping[int, str]]  # who defines them -> number of an error -> its name


def load(environ: Mapping[str, str] | None = None) -> Knowledge:
    """Return how failures look and what they mean (knowledge/failures.yaml).

    Args:
        environ: for the user's cache directory; the process's own where left out.
    """
    return _kept[0] if _kept else parse(loader.load_failures(environ))


def keep(environ: Mapping[str, str]) -> None:
    """Have it in memory from now on; `environ` as for `load`."""
    _kept[:] = [load(environ)]


def parse(document: Mapping[str, Any]) -> Knowledge:
    """Turn the document into values.

    Raises:
        SaferunError: an unknown kind, verdict, weight or key, or a missing key.
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
    values = {key: _frozen(value) for key, value in body.items()}
    kind = _made(Kind, f"kind {name}", name=name, **values)
    _one_of(VERDICTS, kind.verdict, "verdict", f"kind {name}")
    return kind


def _sign(body: Mapping[str, Any], kinds: Mapping[str, Kind]) -> Sign:
    where = f"a sign of {body.get('kind')}"
    values = {key: _frozen(value) for key, value in body.items()}
    for key, value in values.items():
        if key in ("types", "explains"):
            values[key] = frozenset(value)
        elif isinstance(value, tuple):
            values[key] = tuple(map(str.lower, value))
    values["says"] = tuple(map(needle, values.get("says", ())))
    values["doing"] = _doing(values.get("doing", ()))
    values["weight"] = WEIGHTS[_one_of(WEIGHTS, body.get("weight", "cause"), "weight", where)]
    sign = _made(Sign, where, **values)
    for name in (sign.kind, *sign.explains):
        _known(name, kinds)
    return sign


def _frozen(value: Any) -> Any:
    """Return texts of a list, or of lists by the releases that print them, as a tuple."""
    if isinstance(value, Mapping):
        return tuple(str(text) for texts in value.values() for text in texts)
    return tuple(map(str, value)) if isinstance(value, list) else value


def _made(of: Callable[..., Made], where: str, **values: Any) -> Made:
    try:
        return of(**values)
    except TypeError as error:  # it names the key that is missing, or that there is none of
        raise SaferunError(str(error), where=where) from None


def _doing(phrases: Sequence[str]) -> str:
    """Return a pattern of what a job does, which is not part of a path or a setting's name."""
    words = "|".join(map(re.escape, phrases))
    return rf"(?<![\w/-])(?:{words})(?![/:=])" if words else ""


def _one_of(known: Collection[str], value: str, what: str, where: str) -> str:
    if value not in known:
        raise SaferunError(f"unknown {what} `{value}`", where=where)
    return value


def _known(name: str, kinds: Mapping[str, Kind]) -> None:
    _one_of(kinds, name, "kind", "knowledge/failures.yaml")


def needle(text: str) -> Needle:
    """Return the parts of a phrase, which ` ... ` stands between."""
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
