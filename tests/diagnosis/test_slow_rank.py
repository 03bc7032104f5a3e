"""Which rank the others wait for, by times drawn at random: named where it is one alone."""

import itertools
import pickle
import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from saferun.diagnosis import slow_rank
from saferun.diagnosis.flight_record import Call
from saferun.diagnosis.slow_rank import Slow, Times

STEPS = 120
HOW = ["at once", "each in turn", "on the gpu"]


def drawn(
    seed: int,
    ranks: int = 8,
    slower: Mapping[int, float] = {},
    noise: float = 0.03,
    how: str = "at once",
    pause_at: int = -1,
    timed: bool = True,
) -> dict[int, Times]:
    """Return the times of ranks whose steps take a second each, with five collectives in it.

    Args:
        seed: of the noise.
        ranks: their number.
        slower: rank -> by how much of a step.
        noise: the deviation of a step's time.
        how: the collectives are under way together, or waited for in turn; or NCCL's.
        pause_at: a step in which rank 0 evaluates for a minute.
        timed: NCCL's have a duration.
    """
    rng, clock, of_gpu = random.Random(seed), 0.0, how == "on the gpu"
    calls: dict[int, dict[int, Call]] = {rank: {} for rank in range(ranks)}
    for step in range(STEPS):
        work = {r: max(0.2, rng.gauss(1, noise)) * (1 + slower.get(r, 0.0)) for r in range(ranks)}
        work[0] += 60 * (step == pause_at)
        ended = clock
        for n in range(5):
            share = 1.0 if how == "each in turn" else 0.4 + 0.12 * (n + 1)
            at = {rank: clock + work[rank] * share for rank in work}
            if how == "each in turn":  # of which the first one is waited for
                at = {r: max(at[r], ended) if n else at[r] for r in at}
            started = {rank: max(at[rank], ended) for rank in at}
            ended = max(started.values()) + 0.001
            for rank in at:
                lasts_s = ended - started[rank] if of_gpu and timed else None
                called = clock + rng.random() / 50 if of_gpu else at[rank]
                call = Call("0", 5 * step + n, "all_reduce", f"[{n}]", at_s=called, lasts_s=lasts_s)
                calls[rank][call.number] = call
        clock = ended
    return {rank: Times({"0": of}, of_gpu) for rank, of in calls.items()}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("slower", [0.2, 0.5])
def test_a_rank_slower_by_a_fifth_or_a_half_is_named_with_what_it_costs(how, ranks, slower):
    for seed in range(4):
        found = slow_rank.judge(drawn(seed, ranks, {1: slower}, how=how))
        assert (found.rank, found.calls, found.is_proven) == (1, 5 * STEPS, True)
        least = 0.1 if how == "on the gpu" else 0.7 * slower / (1 + slower)
        assert least < found.share == round(found.share, 3) < slower / (1 + slower) + 0.03


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.3])
def test_equal_ranks_with_noise_are_not_named(how, ranks, noise):
    for seed in range(4):
        pause = 60 if seed % 2 else -1
        assert slow_rank.judge(drawn(seed, ranks, noise=noise, how=how, pause_at=pause)) is None


@pytest.mark.parametrize("how", HOW)
def test_a_rank_slower_by_less_than_a_tenth_and_two_slow_ones_are_not_named(how):
    for seed in range(4):
        assert slow_rank.judge(drawn(seed, slower={3: 0.08}, noise=0.01, how=how)) is None
        assert slow_rank.judge(drawn(seed, slower={1: 0.5, 2: 0.5})) is None


def test_a_slow_rank_is_named_beside_one_that_evaluates_once():
    slow = slow_rank.judge(drawn(0, slower={1: 0.5}, pause_at=60))
    assert slow.rank == 1


def test_calls_of_nccl_alone_are_a_suspicion_or_nothing():
    times = drawn(0, slower={1: 0.5}, how="on the gpu", timed=False)
    assert slow_rank.wants_durations(times)
    assert slow_rank.judge(times) is None, "its host is not behind"
    host = drawn(0, slower={1: 0.5})
    late = {rank: replace(one, is_nccl=True) for rank, one in host.items()}
    found = slow_rank.judge(late)
    assert (found.rank, found.is_proven) == (1, False)
    assert not slow_rank.wants_durations(drawn(0, how="on the gpu"))
    assert not slow_rank.wants_durations(host)


def test_of_two_groups_whom_a_slow_rank_holds_up_is_not_named():
    """Rank 1 holds up 0 in a group of both, and so does 0 in its group with 2."""
    pair = drawn(0, 2, {1: 0.5})
    rows = {rank: {"row": one.groups["0"]} for rank, one in pair.items()}
    held = pair[1].groups["0"]
    late = {n: replace(call, at_s=call.at_s - 0.4) for n, call in held.items()}
    times = {0: Times({**rows[0], "column": held}), 1: Times(rows[1]), 2: Times({"column": late})}
    found = slow_rank.judge(times)
    assert found.rank == 1


def test_a_pipeline_a_short_record_one_rank_and_none_tell_nothing():
    times = drawn(0, slower={1: 0.5})
    short = {
        rank: Times({"0": dict(itertools.islice(one.groups["0"].items(), 150))})
        for rank, one in times.items()
    }
    sends = {rank: replace(one, sends=rank == 0) for rank, one in times.items()}
    assert [slow_rank.judge(one) for one in (sends, short, {1: times[1]}, {})] == [None] * 4


def entry(number: int, **changed: object) -> dict[str, object]:
    known = {
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000 + number,
        "input_sizes": [[3]],
        "is_p2p": False,
    }
    return {**known, **changed}


def test_a_dump_is_read_as_torch_writes_it():
    entries = [
        entry(1, duration_ms=2.5),
        entry(2),
        entry(3, profiling_name="nccl:broadcast"),
        entry(4, profiling_name="gloo:all_reduce"),
        entry(5, profiling_name="nccl:send", is_p2p=True),
    ]
    config = {"0": {"desc": "default_pg", "ranks": "[0, 1]"}}
    found = slow_rank.read(pickle.dumps({"entries": entries, "pg_config": config}, protocol=2))
    ((name, calls),) = found.groups.items()
    assert "(0, 1)" in name
    assert [(n, call.lasts_s, call.name) for n, call in calls.items()] == [
        (1, 0.0025, "all_reduce"),
        (2, None, "all_reduce"),
    ]
    assert (found.is_nccl, found.sends) == (True, True)


@pytest.mark.parametrize("content", [b"{", pickle.dumps({"entries": [entry(1)]})[:-20]])
def test_what_is_no_dump_is_none(content):
    assert slow_rank.read(content) is None


BROKEN = (
    *({"collective_seq_id": "x"}, {"time_created_ns": -1}, {"time_created_ns": None}),
    *({"profiling_name": 7}, {"process_group": None}, {"input_sizes": None}),
    {"duration_ms": "long"},
)


def test_entries_that_are_broken_do_no_harm():
    for changed in BROKEN:
        found = slow_rank.read(pickle.dumps({"entries": [entry(1, **changed), 3, {}]}))
        assert found is not None
        assert slow_rank.judge({0: found, 1: found}) is None


def test_the_line_says_who_and_what_it_costs():
    found = Slow(3, 0.172, 2000)
    line = slow_rank.sentence(found, ["its GPU (GPU-1) runs at 1200 MHz, the others at 1980 MHz"])
    assert line == (
        "rank 3 is slow: the others waited for it throughout the last 2000 collectives, and the "
        "job loses 17% of its time by it; its GPU (GPU-1) runs at 1200 MHz, the others at 1980 MHz"
    )
