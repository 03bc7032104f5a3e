"""The tool behind `make fuzz` finds what it is there to find."""

import pytest
from repo import tool

fuzz = tool("fuzz")


def linear(content: bytes) -> None:
    for _ in content:
        pass


def quadratic(content: bytes) -> None:
    for _ in content:
        linear(content)


def endless(content: bytes) -> None:
    while content:
        pass


def steepest(run):
    target = fuzz.Target(lambda pick: b"7" * pick.choice((10, 11)), run, fuzz.repeated)
    return fuzz.tried("any", target, range(0, 40), float("inf"))


def test_linear_work_passes_and_work_that_grows_faster_is_found(monkeypatch):
    monkeypatch.setattr(fuzz, "LINES_AT_LEAST", 10)
    assert steepest(linear).misses == []
    assert len(steepest(quadratic).misses) == 4, "of 40 inputs"


def test_work_without_end_is_ended(monkeypatch):
    monkeypatch.setattr(fuzz, "MOST_LINES", 10_000)
    with pytest.raises(fuzz.EndlessError):
        fuzz.lines_of(endless, b"x", 1)
