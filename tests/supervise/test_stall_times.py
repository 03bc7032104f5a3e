"""A stall is named within a minute of its beginning, by the watch's own times."""

import pytest

from saferun.diagnosis.silence import Look, RankSign, Silence
from saferun.supervise.watch import flight_dumps, hang_watch, ras_query

RANKS = tuple(RankSign(rank, 100 + rank, "S", 0.0, "futex_do_wait") for rank in range(2))
ANSWERS_S = max(ras_query.LIMIT_S, flight_dumps.LIMIT_S) + hang_watch._AGAIN_S


def named_after(limit_s: float | None, stands_from_s: float, late_s: float) -> float:
    """Return the seconds from a job's last sign of work until all that is asked has answered.

    Args:
        limit_s: watch.silence_s.
        stands_from_s: when the last sign came; the looks begin at 0.
        late_s: how much each look comes too late, as on a machine under load.
    """
    every_s = min(hang_watch._EVERY_S, (limit_s or 60.0) / 4)
    silence, at_s = Silence(limit_s), 0.0
    while at_s < 1000.0:
        seen = Look(at_s, (int(min(at_s, stands_from_s)),), RANKS)
        if silence.take(seen, every_s) or silence.stalls(seen):
            return at_s + ANSWERS_S + late_s - stands_from_s
        at_s += silence.look_again_s(at_s, every_s) + late_s
    return at_s


@pytest.mark.parametrize("limit_s", [None, 3600.0, 600.0, 90.0, 61.0, 45.0, 30.0, 20.0])
@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_whatever_the_limit_is_a_stall_is_named_within_a_minute(limit_s, late_s):
    after = [named_after(limit_s, 200.0 + phase, late_s) for phase in range(16)]
    assert max(after) <= 60.0
    if limit_s is None or limit_s > 60:
        assert min(after) > 30.0, "two quiet looks, and not less"
