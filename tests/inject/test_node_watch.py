"""When a node counts as silent: by the observer's own clock, whatever the counters are."""

from __future__ import annotations

from saferun.inject.node_watch import LOST_S, Beats


def test_a_node_whose_counter_stands_still_is_silent():
    beats = Beats(3, now=100.0)
    assert beats.silent(["1", "1", "1"], 101.0) == []
    assert beats.silent(["2", "1", "2"], 101.0 + LOST_S) == []
    assert beats.silent(["3", "1", "3"], 101.1 + LOST_S) == [1]


def test_a_node_that_beats_again_is_not_silent():
    """The network was cut, and has healed."""
    beats = Beats(2, now=0.0)
    assert beats.silent(["1", "1"], 1.0) == []
    assert beats.silent(["9", "1"], 39.0) == []
    assert beats.silent(["10", "20"], 40.0) == []
    assert beats.silent(["20", "21"], 60.0) == []


def test_a_node_that_never_beat_is_silent():
    beats = Beats(2, now=0.0)
    assert beats.silent(["1", "0"], LOST_S + 0.1) == [1]
