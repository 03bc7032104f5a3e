"""Pure: the lines of a log that are alike but for their digits, as the steps of a training are.

What depends on a line's words and not on its numbers is found once for each form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.diagnosis.reading.log_lines import Line

_DIGITS = dict.fromkeys(map(ord, "123456789"), "0")
_DIGIT = frozenset("123456789")


def of(lines: Sequence[Line]) -> list[str]:
    """Return the form of each line: its text with each digit as 0.

    >>> of([Line(1, None, "step 12 loss 3.4", "")])
    ['step 00 loss 0.0']
    """
    return "\n".join([line.text for line in lines]).translate(_DIGITS).split("\n") if lines else []


def of_word(word: str) -> str:
    """Return the form of a word, which few have digits in."""
    return word if _DIGIT.isdisjoint(word) else word.translate(_DIGITS)


def which(forms: Sequence[str], holds: Callable[[str], bool]) -> list[bool]:
    """Return for each form whether something holds for it that no digit decides."""
    known = {form: holds(form) for form in set(forms)}
    return [known[form] for form in forms]
