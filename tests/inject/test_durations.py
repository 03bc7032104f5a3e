"""Durations have one style, for limits as for what was measured."""

from __future__ import annotations

import pytest

from saferun.inject.durations import seconds

STYLE = {
    0: "0 s",
    0.25: "0.2 s",
    3.14: "3.1 s",
    20: "20 s",
    59.7: "1 min",
    75: "1 min 15 s",
    600: "10 min",
    3600: "1 h",
    7300: "2 h 1 min",
    200_000: "55 h 33 min",
}


@pytest.mark.parametrize(("value_s", "text"), STYLE.items(), ids=STYLE.values())
def test_a_duration_is_shown_without_parts_that_are_zero(value_s: float, text: str) -> None:
    assert seconds(value_s) == text
