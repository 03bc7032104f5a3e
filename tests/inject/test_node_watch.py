"""When a node counts as silent: by the observer's own clock, whatever the counters are."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from repo import ROOT

from saferun.inject.node_watch import LOST_S, Beats, every_s, first_beat_s


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


@pytest.mark.parametrize("size", [20, 200, 1000])
def test_the_beats_of_many_nodes_come_one_after_the_other(size: int):
    """They have all just met; in each tenth of the time comes a tenth of them."""
    firsts = [first_beat_s(node, size) for node in range(size)]
    tenths = [
        sum(int(10 * first / every_s(size)) == tenth for first in firsts) for tenth in range(10)
    ]
    assert sum(tenths) == size
    assert max(tenths) <= size // 10 + 1


def test_a_thousand_nodes_beat_seldom_enough_for_the_host_and_often_enough_to_live():
    assert every_s(2) < 2.1
    assert 1000 / every_s(1000) <= 100
    assert 3 * every_s(100_000) < LOST_S


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 1])
def test_a_beat_that_is_inside_torch_as_the_agent_ends_changes_no_exit_status(status: int):
    program = ROOT / "tests" / "programs" / "nodes" / "late_beat.py"
    done = subprocess.run(
        [sys.executable, str(program), str(status)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
