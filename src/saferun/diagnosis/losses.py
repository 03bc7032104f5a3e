"""Pure: the losses that a training prints while it runs, and whether they are numbers any more.

A loss is the number behind that word, in a line about training: `val_loss`, `best loss`, `aux_loss`
and what a line about an evaluation has are none. Losses are compared where the words before them in
their lines are the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from saferun.diagnosis.evidence import NoNumber
from saferun.diagnosis.reading import progress

LINES, STEPS = 5, 20  # that have no number, before it is believed
_CHARS = 1000  # searched in a line
_SHORT = 8192  # bytes, at the end, that are read while nothing in an output is "nan" or "inf"
_NEAR = 30  # lines before a loss in which its step may stand: a bar above transformers' dictionary

_VALUE = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?:\.0)?"
# "loss: 2.3", "loss nan", "loss=nan.0", "'loss': '2.31'", "Loss: 6.93 (6.94)", "lm loss: 9.9E+00",
# "loss: tensor(nan, …". A word may stand before it, as in "train/loss".
_LOSS = re.compile(
    rf"(?<![\w./-])(?P<word>(?:[a-z]{{1,20}}[_/.-])?)loss['\"]?\s{{0,3}}[:=]?\s{{0,3}}"
    rf"(?:['\"]|tensor\()?(?P<value>{_VALUE})(?![\w%]|\.\d)",
    re.IGNORECASE | re.ASCII,
)
# Ultralytics prints columns: epoch, memory, the losses, instances, size.
_COLUMNS = re.compile(
    rf"^\s{{1,12}}\d{{1,5}}/\d{{1,5}}\s+[\d.]+G\s+(?P<value>{_VALUE})\s+(?:{_VALUE}\s+)+\d+:",
    re.IGNORECASE | re.ASCII,
)
# Words that may stand before the training's own loss; with any other one it is another loss.
_OWN = (
    *("train", "training", "lm", "mlm", "ce", "nll", "total", "overall", "step", "batch", "avg"),
    *("average", "mean", "running", "current", "iter", "iteration", "epoch", "smooth", "smoothed"),
    *("global", "rank", "gpu", "info", "debug"),
)
_EVALUATES = re.compile(
    r"(?<![a-z])(?:val|valid|validation|eval\w*|test\w*|dev|best)(?![a-z])", re.I
)
_NO_NUMBER = re.compile(rb"nan|[+-]?inf(?:inity)?\b", re.IGNORECASE)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_WORDS = re.compile(r"(?<![\dA-Za-z.])[A-Za-z]{2,}")
_NO_FORM = ("nan", "inf", "it")  # words that come and go with the numbers beside a loss


class _Reading(NamedTuple):
    """One loss of a training."""

    form: str
    value: str
    line: int  # index of its line

    @property
    def is_number(self) -> bool:
        return "n" not in self.value.lower()  # of nan and inf


class _Good(NamedTuple):
    """The last number of a form."""

    value: str
    step: int | None
    at_s: float  # it was printed after this


class Losses:
    """The losses of one attempt, looked at again and again.

    Args:
        at_s: when the attempt began, in seconds since the epoch.
        has_numbers: the training printed numbers before, in an earlier attempt.
    """

    def __init__(self, at_s: float, *, has_numbers: bool = False) -> None:
        self._looked_at_s = at_s
        self._began = _Good("", None, at_s) if has_numbers else None
        self._good: dict[str, _Good] = {}

    def take(self, outputs: list[bytes], at_s: float) -> NoNumber | None:
        """Return which loss is no number any more; None where there is none.

        Args:
            outputs: the ends of what the job has written so far.
            at_s: now, in seconds since the epoch.
        """
        found = None
        for output in outputs:
            if not _NO_NUMBER.search(output):
                output = output[-_SHORT:]
            lines = _ANSI.sub("", output.decode("latin-1")).replace("\r", "\n").split("\n")
            found = self._of_output(lines) or found
        self._looked_at_s = at_s
        return found

    def _of_output(self, lines: list[str]) -> NoNumber | None:
        by_form: dict[str, list[_Reading]] = {}
        for reading in _readings(lines):
            by_form.setdefault(reading.form, []).append(reading)
        told = (self._of_form(form, readings, lines) for form, readings in by_form.items())
        return next(filter(None, told), None)

    def _of_form(self, form: str, readings: list[_Reading], lines: list[str]) -> NoNumber | None:
        last = max((at for at, one in enumerate(readings) if one.is_number), default=-1)
        if last >= 0:
            self._note(readings[last], lines)
        good, bad = self._good.get(form, self._began), readings[last + 1 :]
        if good is None or not bad:
            return None
        steps = [_step(lines, one.line) for one in bad]
        known = [step for step in steps if step is not None]
        # A bar is drawn again and again at one step.
        again = sum(step is not None and step == before for before, step in pairwise(steps))
        count = len(bad) - again
        if count < LINES and (not known or known[-1] - known[0] < STEPS):
            return None
        value = "nan" if "nan" in bad[0].value.lower() else "infinite"
        return NoNumber(value, steps[0], good.value, good.step, good.at_s)

    def _note(self, reading: _Reading, lines: list[str]) -> None:
        known, step = self._good.get(reading.form), _step(lines, reading.line)
        if known is None or (known.value, known.step) != (reading.value, step):
            self._good[reading.form] = _Good(reading.value, step, self._looked_at_s)


def _readings(lines: list[str]) -> Iterator[_Reading]:
    """Yield the losses of the training; the last line may go on."""
    for at, line in enumerate(lines[:-1]):
        text = line[:_CHARS]
        if "loss" in text or "Loss" in text or "LOSS" in text:
            yield from _of_line(at, text)
        elif found := _COLUMNS.match(text):
            yield _Reading("columns", found["value"], at)


def _of_line(at: int, text: str) -> Iterator[_Reading]:
    for found in _LOSS.finditer(text):
        before = text[: found.start()]
        if _EVALUATES.search(before):
            return
        # The words between the last mark and the loss: "Average training loss".
        near = re.split(r"[^A-Za-z ]", before)[-1]
        words = [*near.lower().split(), found["word"].lower().rstrip("_/.-")]
        if all(word in _OWN for word in words if word):
            form = " ".join(w for w in _WORDS.findall(before) if w.lower() not in _NO_FORM)
            yield _Reading(f"{form} {found['word']}", found["value"], at)
            return


def _step(lines: list[str], at: int) -> int | None:
    """Return the step of a loss: its line's, else the last one above it."""
    above = range(at, max(-1, at - _NEAR), -1)
    return next((step for n in above if (step := progress.step_in(lines[n])) is not None), None)


def sentence(found: NoNumber) -> str:
    """Return what became of a loss, as a clause for people."""
    since = "" if found.step is None else f" since step {found.step}"
    at = "" if found.good_step is None else f" at step {found.good_step}"
    return f"the loss is {found.value}{since}" + (f" ({found.good}{at})" if found.good else "")
