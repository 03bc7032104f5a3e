"""No pattern in the code takes more than linear time for a line of 100,000 characters."""

import re

import pytest
from backtracking import grows_faster_than_the_text
from pattern_literals import uses
from repo import ROOT

UNITS = [
    "a", "A", "1", " ", "\n", "/", "a ", "1 ", "1.", "-", "_", "=", ":", "(", "[", "│", "│  x",
    "x=", "a:", "\x1b[", "GPU ", ",", "1,", '"', "\\", "http://", "a@", "KEY=", "a.b", "a, ", "'",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)  # nothing is judged by it
def test_the_time_of_every_pattern_grows_with_the_text():
    found = list(uses(ROOT / "src" / "saferun"))
    assert len(found) > 100
    slow = [
        (where, pattern.pattern, unit)
        for where, pattern, method in found
        for unit in UNITS
        if grows_faster_than_the_text(getattr(pattern, method), unit)
    ]
    assert slow == []


@pytest.mark.parametrize(
    ("pattern", "method", "unit"),
    [
        (r"\s*(>=)?\s*(\d+)\s*\Z", "match", " "),
        (r"^\s{0,4}[│|]\s?|\s{0,200}│\s{0,200}$", "search", " "),
        (r"\d*\.?\d+", "fullmatch", "1"),
        (r"(?m)^\s*import", "search", "\n"),
    ],
)
def test_a_pattern_that_this_project_had_is_found(pattern, method, unit):
    slow = grows_faster_than_the_text(getattr(re.compile(pattern), method), unit)
    assert slow is ("{0,200}" not in pattern)  # a bound makes it slow, and still linear
