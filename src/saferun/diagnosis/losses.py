"""Pure: the losses that a running training prints, and whether they are still numbers.

Losses are compared if the words before them in their lines are the same (loss_lines.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from saferun.diagnosis.evidence import NoNumber
from saferun.diagnosis.reading import loss_lines, progress

LINES, STEPS = 5, 20  # lines or steps without a number before it is believed
_SHORT = 8192  # bytes read at the end of an output that has no "nan" or "inf"
_NEAR = 30  # lines above a loss that may have its step: a bar above transformers' dictionary

_NO_NUMBER = re.compile(rb"nan|[+-]?inf(?:inity)?\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One loss of a training."""

    form: str
    value: str
    line: int  # index of its line
    epoch: int | None

    @property
    def is_number(self) -> bool:
        return "n" not in self.value.lower()  # the "n" of nan and inf


@dataclass(frozen=True, slots=True)
class _Good:
    """The last number of one form of line."""

    value: str
    step: int | None
    at_s: float  # the number was printed after this


class Losses:
    """The losses of one attempt, updated at each look.

    Args:
        at_s: when the attempt began, in seconds since the epoch.
        has_numbers: the training printed numbers in an earlier attempt.
    """

    def __init__(self, at_s: float, *, has_numbers: bool = False) -> None:
        self._looked_at_s = at_s
        self._began = _Good("", None, at_s) if has_numbers else None
        self._good: dict[str, _Good] = {}

    def take(self, outputs: list[bytes], at_s: float) -> NoNumber | None:
        """Return the loss that is not a number any more; None if there is none.

        Args:
            outputs: the ends of the job's outputs so far.
            at_s: now, in seconds since the epoch.
        """
        found = None
        for output in outputs:
            if not _NO_NUMBER.search(output):
                output = output[-_SHORT:]
            found = self._of_output(progress.plain_lines(output)) or found
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
        # A bar is redrawn many times at one step; the same step of another epoch is a different
        # one.
        places = [(one.epoch, step) for one, step in zip(bad, steps, strict=True)]
        again = sum(place[1] is not None and place == before for before, place in pairwise(places))
        count = len(bad) - again
        if count < LINES and (not known or known[-1] - known[0] < STEPS):
            return None
        value = "nan" if "nan" in bad[0].value.lower() else "infinite"
        return NoNumber(value, steps[0], good.value, good.step, good.at_s, bad[0].epoch)

    def _note(self, reading: _Reading, lines: list[str]) -> None:
        known, step = self._good.get(reading.form), _step(lines, reading.line)
        if known is None or (known.value, known.step) != (reading.value, step):
            self._good[reading.form] = _Good(reading.value, step, self._looked_at_s)


def _readings(lines: list[str]) -> Iterator[_Reading]:
    """Yield the losses of the training; the last line may be incomplete."""
    epoch = None
    for at, line in enumerate(lines[:-1]):
        text = line[: loss_lines.CHARS]
        epoch = progress.epoch_in(text, epoch)
        if found := loss_lines.own_loss(text):
            yield _Reading(found.form, found.value, at, epoch)


def _step(lines: list[str], at: int) -> int | None:
    """Return the step of a loss: from its line, else the last step above it."""
    above = range(at, max(-1, at - _NEAR), -1)
    return next((step for n in above if (step := progress.step_in(lines[n])) is not None), None)


def sentence(found: NoNumber) -> str:
    """Return a clause for people about a loss that is not a number any more."""
    since = "" if found.step is None else f" since step {found.step}"
    at = "" if found.good_step is None else f" at step {found.good_step}"
    return f"the loss is {found.value}{since}" + (f" ({found.good}{at})" if found.good else "")
