"""Pure: groups of log lines that differ only in digits, such as the steps of a training.

A property that depends on a line's words and not on its numbers is computed once a group.
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
    """Return the form of a word; few words have digits."""
    return word if _DIGIT.isdisjoint(word) else word.translate(_DIGITS)


def which(forms: Sequence[str], holds: Callable[[str], bool]) -> list[bool]:
    """Return for each form whether a property holds that does not depend on digits.

    Args:
        forms: the forms of lines (`of`).
        holds: tests a form for the property.
    """
    known = {form: holds(form) for form in set(forms)}
    return [known[form] for form in forms]
