"""When a node counts as silent: by the observer's own clock, whatever the counters are."""

import os
import sys

import pytest
from repo import ROOT
from sandbox import captured

from saferun.inject.node.node_watch import LOST_S, Beats, every_s, first_beat_s


def test_a_node_whose_counter_stands_still_is_silent():
    beats = Beats(4, now=100.0)
    assert beats.silent(["1", "1", "1", "0"], 101.0) == []
    assert beats.silent(["2", "1", "2", "0"], 101.0 + LOST_S) == [3]  # it never beat
    assert beats.silent(["3", "1", "3", "0"], 101.1 + LOST_S) == [1, 3]
    assert beats.silent(["4", "9", "4", "0"], 102.0 + LOST_S) == [3]  # a cut that has healed


@pytest.mark.parametrize("size", [20, 200, 1000])
def test_the_beats_of_many_nodes_come_one_after_the_other(size):
    """They have all just met; in each tenth of the time comes a tenth of them."""
    firsts = [first_beat_s(node, size) for node in range(size)]
    tenths = [
        sum(int(10 * first / every_s(size)) == tenth for first in firsts) for tenth in range(10)
    ]
    assert sum(tenths) == size
    assert max(tenths) <= size // 10 + 1
    assert 3 * every_s(size) < LOST_S


@pytest.mark.slow
@pytest.mark.parametrize("status", [0, 1])
def test_a_beat_that_is_inside_torch_as_the_agent_ends_changes_no_exit_status(status):
    program = ROOT / "tests" / "programs" / "nodes" / "late_beat.py"
    done = captured(
        sys.executable,
        str(program),
        str(status),
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == status, done.stderr
