"""When a silent job may hang, and which rank is elsewhere."""

from typing import Any

import pytest

from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.explaining.silence_report import cause, report, waiting
from saferun.diagnosis.places import (
    Helper,
    Used,
    from_py_spy,
    functions,
    places,
    waits_for_gpu,
    works,
)
from saferun.diagnosis.silence import TERMINAL, Longest, Look, RankSign, Silence

TRAIN = '  File "/w/train.py", line {} in step\n  File "/w/train.py", line 90 in <module>\n'
HELPERS = ((7, "S"), (8, "S"), (9, "T"))
SYNC = '  File "/v/site-packages/torch/cuda/__init__.py", line 2 in synchronize\n'
REDUCE = '  File "/v/site-packages/torch/distributed/distributed_c10d.py", line 2 in all_reduce\n'


def ranks(*states: str, cpu_s: float = 0.0) -> tuple[RankSign, ...]:
    return tuple(
        RankSign(rank, 100 + rank, state, cpu_s, "futex_do_wait")
        for rank, state in enumerate(states)
    )


def look(at_s: float, work: int, cpu_s: float = 0.0) -> Look:
    return Look(at_s, (work,), ranks("S", "S", cpu_s=cpu_s), cpu_s=cpu_s)


def first_alarm(silence: Silence, looks: list[Look], every_s: float = 15.0) -> float | None:
    return next((one.at_s for one in looks if silence.take(one, every_s)), None)


def silent(start_s: int, end_s: int, cores: float = 0.0) -> list[Look]:
    return [look(at, -1, at * cores) for at in range(start_s, end_s, 15)]


@pytest.mark.parametrize(
    ("limit_s", "gap_s", "cores", "alarm_s"),
    [
        (20.0, 15, 0.0, 1035),
        (20.0, 15, 1.0, 1035),  # a given limit: an endless loop uses the CPU, too
        (None, 15, 0.0, 1605),
        (None, 15, 1.0, 8205),  # twelve times as long
        (None, 150, 0.0, 2505),  # ten times the longest gap between two signs of work
    ],
)
def test_the_limit_is_the_given_one_or_follows_the_job(limit_s, gap_s, cores, alarm_s):
    silence = Silence(limit_s)
    working = [look(at, at // gap_s, at * cores) for at in range(0, 1005, 15)]
    quiet = [w for w in working if limit_s is None or gap_s == 15]
    assert first_alarm(silence, quiet) is None
    assert first_alarm(silence, silent(1005, 12000, cores)) == pytest.approx(alarm_s, abs=15)


def slept(at_s: float) -> Look:
    return Look(at_s, (-1,), tuple(r._replace(waits_in="hrtimer_nanosleep") for r in ranks("S")))


def asking(at_s: float) -> Look:
    return Look(at_s, (-1,), tuple(r._replace(waits_in=TERMINAL) for r in ranks("S", "S")))


# A look at a time; when it is told without a limit, and with one of 30 s.
WEAKER = {
    "CPU time of what the ranks have started": (
        lambda at: look(at, -1)._replace(cpu_s=0.2 * at),
        7200,
    ),
    "bytes of other programs": (lambda at: look(at, -1)._replace(beside=int(1e6 * at)), 7200),
    "a sleep": (slept, 7200),
    "a sleep of another program": (lambda at: look(at, -1)._replace(naps=True), 7200),
    "none after a while": (lambda at: look(at, -1, min(at, 1500) * 0.5), 2100),
    "too little of other programs": (lambda at: look(at, -1)._replace(beside=1000 * int(at)), 600),
    "a person at the terminal": (asking, None),
}


@pytest.mark.parametrize(("of", "told_s"), WEAKER.values(), ids=WEAKER)
def test_a_weaker_sign_of_work_lengthens_the_limit_of_the_jobs_own_rhythm_only(of, told_s):
    looks = [of(float(at)) for at in range(0, 8000, 15)]
    assert first_alarm(Silence(None), looks) == told_s
    assert first_alarm(Silence(30.0), looks) == 30


def test_costlier_signs_are_asked_for_only_where_the_limit_is_near():
    silence = Silence(None)
    near = []
    for at in range(0, 615, 15):
        near.append(silence.is_near(look(float(at), 1)))
        silence.take(look(float(at), 1), 15.0)
    assert near == [at >= 300 for at in range(0, 615, 15)]
    silence.note_busy(540.0)
    later = [look(float(at), 1) for at in range(615, 1500, 15)]
    assert first_alarm(silence, later) is None, "told at 600, once"


def test_the_next_look_comes_when_a_silence_that_lasts_is_too_long():
    silence = Silence(20.0)
    assert silence.look_again_s(0.0, 5.0) == 5.0
    silence.take(look(1.0, 1), 5.0)
    assert [silence.look_again_s(at, 5.0) for at in (2.0, 6.0, 16.5, 20.0)] == [5.0, 5.0, 4.5, 1.0]
    assert silence.look_again_s(10.0, 5.0) == 1.0, "half of it is a stall"
    silence.take(look(20.0, 1), 5.0)
    assert silence.take(look(21.0, 1), 5.0)
    assert silence.look_again_s(20.9, 5.0) == 5.0  # it has been told


def test_a_silence_is_told_once_and_a_new_one_again():
    silence = Silence(30.0)
    looks = [*silent(0, 600), look(600.0, 5), *silent(615, 900)]
    assert [one.at_s for one in looks if silence.take(one, 15.0)] == [30.0, 645.0]


def test_what_the_ranks_write_when_they_are_asked_is_no_sign_of_work():
    silence = Silence(30.0)
    told = [one.at_s for one in silent(0, 60) if silence.take(one, 15.0)]
    silence.answered(look(83.0, 3))  # asked at 30, and after a slow py-spy nobody had looked
    late = [look(float(at), 4) for at in range(98, 998, 15)]  # one more answer, and silence
    assert (told, first_alarm(silence, late)) == ([30.0], None)
    again = [look(1000.0, 5), *(look(float(at), 5) for at in range(1015, 1100, 15))]
    assert first_alarm(silence, again) == 1030.0


def test_time_in_which_nobody_looked_is_no_silence():
    silence = Silence(30.0)
    silence.take(look(0.0, 1), 15.0)
    assert silence.take(look(900.0, 1), 15.0) is None  # saferun was stopped meanwhile
    assert silence.take(look(915.0, 1), 15.0) is None


def stack(*frames: str) -> str:
    other = 'Thread 0x01 (most recent call first):\n  File "/w/loader.py", line 1 in run\n\n'
    return f"{other}Current thread 0x02 (most recent call first):\n{''.join(frames)}\n{other}"


def odd(states: str, stacks: dict[int, str], *, gone: int | None = None, cores: float = 0.0):
    since = Look(0.0, (), ranks(*states))
    now = [one for one in ranks(*states) if one.rank != gone]
    now = [one._replace(cpu_s=60 * cores) if one.rank == 1 else one for one in now]
    found = places(since, Look(60.0, (), tuple(now)), stacks)
    return found, [place.rank for place in found if place.odd]


def at(line: int, *calls: str) -> str:
    """Return the stack of a rank in a line of the script, in some calls of torch."""
    return stack(*calls, TRAIN.format(line))


ELSEWHERE = {  # states, stacks, more; the ranks that are elsewhere, and what the first of them does
    "stopped": ("STS", {}, {}, [1], "is stopped, by a signal or a debugger"),
    "in the kernel": ("SSD", {}, {}, [2], "waits in futex_do_wait, and no signal can end it"),
    "gone": ("SSS", {}, {"gone": 0}, [0], "has ended"),
    "one computes": ("SSSS", {}, {"cores": 1.0}, [1], "computes on 1.0 cores"),
    "all are together": ("SSSS", {}, {}, [], ""),
    "one is in no collective": (
        "SS", {100: at(33, REDUCE), 101: at(12)}, {}, [1], "waits in futex_do_wait",
    ),
    "one computes, one waits for its GPU": (
        "SS", {100: at(33, SYNC), 101: at(12)}, {"cores": 0.2}, [1], "computes on 0.2 cores",
    ),
    "a kernel that may never end": (
        "SS", {100: at(33, SYNC), 101: at(12, REDUCE)}, {}, [0], "waits for its GPU",
    ),
    "one alone is at another collective": (
        "SSS", {100: at(33, SYNC), 101: at(12, REDUCE), 102: at(33, SYNC)}, {}, [1],
        "waits in futex_do_wait",
    ),
    "one is at another line": (
        "SSS", {100: at(33, REDUCE), 101: at(40, REDUCE), 102: at(33, REDUCE)}, {}, [1],
        "waits in futex_do_wait",
    ),
    "two at two lines": ("SS", {100: at(33, REDUCE), 101: at(40, REDUCE)}, {}, [], ""),
}  # fmt: skip


@pytest.mark.parametrize(
    ("states", "stacks", "more", "elsewhere", "what"), ELSEWHERE.values(), ids=ELSEWHERE
)
def test_who_is_elsewhere_and_what_it_does(states, stacks, more, elsewhere, what):
    found, ranks_elsewhere = odd(states, stacks, **more)
    assert ranks_elsewhere == elsewhere
    assert [place.what for place in found if place.odd][:1] == ([what] if what else [])


def test_a_rank_that_had_ended_before_the_silence_began_is_elsewhere():
    silence = Silence(30.0)
    both = ranks("S", "S")
    silence.take(Look(0.0, (1, 2), both), 15.0)
    alone = [Look(float(at), (1,), both[:1]) for at in range(15, 60, 15)]
    began = next(since for one in alone if (since := silence.take(one, 15.0)))
    found = places(began, alone[-1], {})
    assert [(place.what, place.odd) for place in found if place.rank == 1] == [("has ended", True)]
    assert cause(found).rank == 1


def test_the_worker_that_a_rank_waits_for_is_shown_and_no_idle_one():
    busy, idle, stopped = (Helper(101, pid, state, "futex") for pid, state in HELPERS)
    stacks = {
        101: stack(TRAIN.format(12)),
        busy.pid: stack('  File "/w/data.py", line 7 in load\n'),
        idle.pid: stack('  File "/v/site-packages/torch/utils/data/worker.py", line 7 in get\n'),
    }
    look_now = Look(60.0, (), ranks("S", "S"))
    found = places(look_now._replace(at_s=0.0), look_now, stacks, [busy, idle, stopped], [1])
    told = "its worker (pid 7) waits in futex, at /w/data.py:7 in load"
    assert found[1].helpers == (told, "its worker (pid 9) is stopped, by a signal or a debugger")
    assert f"    {told}" in report(found, "20 s")
    assert cause(found).line == f"waits in futex_do_wait at /w/train.py:12 in step; {told}"


COMPILED = "/tmp/torchinductor_u/sd/csd5eytmxtb7ig3ioxvecjlnlprhi2wq3nch7ac56mbefrf3fgqx.py"
OF_OTHERS = (
    *("/v/saferun/inject/hooks/shards.py", "/h/runs/1/hooks/inject/hooks/shards.py", COMPILED),
)


def test_the_frame_shown_is_none_of_our_own_nor_of_what_inductor_has_compiled():
    for path in OF_OTHERS:
        found, _ = odd(
            "SS", {100: at(33, f'  File "{path}", line 2 in following\n'), 101: stack(REDUCE)}
        )
        assert found[0].frame == "/w/train.py:33 in step"
        assert functions(found) == {"/w/train.py in step"}


def test_the_rank_that_is_behind_by_torchs_record_is_elsewhere():
    since = Look(0.0, (), ranks("S", "S", "S"))
    found = places(since, since._replace(at_s=60.0), {}, behind=[2])
    assert [place.rank for place in found if place.odd] == [2]
    told = Hang("hang", 2, "rank 2 has not entered all_reduce")
    assert report(found, "20 s", told)[-1].endswith("rank 2 has not entered all_reduce")
    assert cause(found, told).rank == 2
    mismatch = Hang("collective-mismatch", 2, "number 3")
    assert cause(found, mismatch) == mismatch


def test_a_call_that_waits_for_a_gpu_is_found_in_the_stack_of_cpp():
    since = Look(0.0, (), ranks("R", "R"))
    stacks = {100: stack(TRAIN.format(33)), 101: stack(TRAIN.format(12))}
    found = places(since, since._replace(at_s=60.0), stacks, at_gpu=[100])
    assert [(place.what, place.odd) for place in found] == [
        ("waits for its GPU", False),
        ("computes on 0.0 cores", True),
    ]
    spied = 'Thread 8 (active): "loader"\n    cudaStreamSynchronize (libcudart.so.13)\n'
    spied += 'Thread 7 (active): "MainThread"\n    0x7f8 (libcuda.so)\n    {} (/w/libcuda.so)\n'
    calls = ("cuCtxSynchronize_v2", "cudaStreamSynchronize", "cudaLaunchKernel", "cuMemcpyDtoH_v2")
    assert all(waits_for_gpu(spied.format(call)) for call in calls)
    assert not waits_for_gpu(spied.format("clock_nanosleep"))


def test_the_cause_is_the_rank_that_is_elsewhere_or_a_mismatch_of_collectives():
    found, _ = odd("SST", {})
    assert cause(found) == Hang("hang", 2, "is stopped, by a signal or a debugger")
    same, other = (stack(REDUCE, TRAIN.format(line)) for line in (33, 40))
    mismatch = cause(odd("SS", {100: same, 101: other})[0])
    assert (mismatch.kind, mismatch.rank) == ("collective-mismatch", None)
    assert mismatch.line == "rank 0 at /w/train.py:33 in step; rank 1 at /w/train.py:40 in step"
    together = cause(odd("SS", {100: same, 101: same})[0])
    assert together == Hang("hang", None, "waits in futex_do_wait at /w/train.py:33 in step")
    for held, what in (("T", "is stopped"), ("D", "waits in futex_do_wait, and no signal")):
        hang = cause(odd(f"S{held}", {100: same, 101: other})[0])
        assert (hang.kind, hang.rank) == ("hang", 1)  # wherever it was held
        assert hang.line.startswith(what)


def test_py_spys_frames_are_those_of_faulthandler():
    spied = 'Thread 7 (idle): "MainThread"\n    C++ (libc.so)\n    Trainer.update (/w/t.py:9)\n'
    spied += 'Thread 8 (idle): "loader"\n    run (/w/loader.py:1)\n'
    assert from_py_spy(spied) == '  File "/w/t.py", line 9 in update\n'
    spied = spied.replace("Trainer.update", "main.<locals>.<lambda>")
    assert from_py_spy(spied) == '  File "/w/t.py", line 9 in <lambda>\n'


def test_who_waits_for_whom_is_one_line():
    away, waits = stack(TRAIN.format(88)), stack(REDUCE, TRAIN.format(33))
    stacks = {100: away, 101: waits, 102: waits, 103: waits}
    line = waiting(odd("SSSS", stacks)[0], "75 s")
    assert line == "rank 0 is at /w/train.py:88 in step, 3 ranks wait for it in all_reduce (75 s)"
    stopped, _ = odd("ST", {100: waits})
    line = waiting(stopped, "75 s")
    assert line == (
        "rank 1 is stopped, by a signal or a debugger, rank 0 waits for it in all_reduce (75 s)"
    )
    two, _ = odd("SSSS", {**stacks, 101: away})
    assert waiting(two, "75 s") == (
        "rank 0 is at /w/train.py:88 in step and 1 more ranks like it, "
        "2 ranks wait for them in all_reduce (75 s)"
    )


def test_where_nobody_waits_for_anybody_no_line_is_made():
    away, waits = stack(TRAIN.format(88)), stack(REDUCE, TRAIN.format(33))
    assert waiting(odd("SS", {100: waits, 101: waits})[0], "75 s") == ""
    assert (
        waiting(odd("SSS", {100: away, 101: away, 102: stack(TRAIN.format(12))})[0], "75 s") == ""
    )
    since = Look(0.0, (), ranks("S", "S"))
    by_record = places(since, since._replace(at_s=60.0), {100: away}, behind=[0])
    assert "rank 1 waits for it in broadcast (75 s)" in waiting(by_record, "75 s", "broadcast")


@pytest.mark.parametrize(
    ("limit_s", "stalls_s"), [(None, 30), (600.0, 30), (40.0, 20), (15.0, None)]
)
def test_a_silence_of_several_ranks_is_a_stall_long_before_its_limit(limit_s, stalls_s):
    def first(alone: bool) -> float | None:
        silence = Silence(limit_s)
        for one in (*[look(at, at) for at in (0, 5)], *[look(at, 5) for at in range(10, 80, 5)]):
            seen = one._replace(ranks=one.ranks[:1]) if alone else one
            began = silence.take(seen, 5.0)
            if began is None and silence.stalls(seen):
                assert silence.stalls(seen) is None, "each once"
                return seen.at_s - 5
        return None

    assert first(alone=False) == stalls_s
    assert first(alone=True) is None


def test_a_rank_that_ended_before_the_others_fell_silent_is_one_that_they_may_wait_for():
    silence, both = Silence(600.0), ranks("S", "S")
    silence.take(Look(0.0, (1, 2), both), 10.0)
    alone = [Look(float(at), (1,), both[:1]) for at in range(10, 60, 10)]
    (began,) = (
        since for one in alone if not silence.take(one, 10.0) and (since := silence.stalls(one))
    )
    assert [one.rank for one in began.ranks] == [0, 1]


def test_a_rank_of_another_machine_for_which_all_of_these_wait_is_told():
    waits = stack(REDUCE, TRAIN.format(33))
    here, _ = odd("SS", {100: waits, 101: waits})
    far = "rank 9 on h2 launched 40 collectives, others of its group 41"
    assert waiting(here, "52 s", elsewhere=far) == f"{far}; 2 ranks wait here in all_reduce (52 s)"
    away, _ = odd("SS", {100: waits, 101: stack(TRAIN.format(88))})
    assert waiting(away, "52 s", elsewhere=far).startswith("rank 1 is at ")


def worked(state: str = "S", waits_in: str = "", cpu_s: float = 0.0, **more: Any) -> bool:
    """Return whether rank 0, for which rank 1 waits, works in a minute in which this comes."""
    used = Used(cpu_s, more.pop("runs", False))
    spins = RankSign(1, 101, "R", 60.0, "")  # a rank of NCCL that waits
    later = Look(60.0, (), (RankSign(0, 100, state, 0.0, waits_in), spins), 60.0, **more)
    before = Look(0.0, (), ranks("S", "S"))
    found = places(before, before, {100: stack(TRAIN.format(88)), 101: stack(REDUCE)}, behind=[0])
    return works(found, before, later, used)


def test_only_what_the_awaited_rank_does_is_its_work():
    assert not worked()
    assert not worked(state="T")
    assert not worked(cpu_s=5.0)
    assert worked(cpu_s=7.0)
    assert worked(runs=True)
    assert worked(state="D")
    assert worked(state="t")
    assert worked(waits_in="do_wait")
    assert worked(waits_in="request_wait_answer"), "a mounted bucket takes a checkpoint"
    assert not worked(waits_in="hrtimer_nanosleep"), "whoever sleeps moves nothing"
    assert worked(naps=True)
    assert worked(beside=60 << 20)


def test_a_stall_is_told_on_stderr_where_no_rank_was_waited_for_half_as_long():
    longest = Longest()
    assert longest.loud_s() == longest.loud_s(works=True) == 60.0
    silence = Silence(None, longest)
    for at, work in ((0, 1), (10, 2), (20, 2), (30, 2), (40, 2), (50, 3)):
        silence.take(look(float(at), work), 10.0)
        stalls = silence.stalls(look(float(at), work))
        assert (stalls is not None) == (at == 40)
    assert longest.silence_s == 40.0
    assert longest.loud_s() == 60.0, "in that silence nobody was waited for"
    assert longest.loud_s(works=True) == 400.0
    longest.wait_s = 45.0
    assert (longest.loud_s(), longest.loud_s(works=True)) == (90.0, 400.0)
    again = Silence(None, longest)  # that of the next attempt
    for at in (0, 10, 20):
        again.take(look(float(at), at // 20), 10.0)
    assert longest.silence_s == 40.0


def test_a_stall_that_lasts_is_asked_for_again_and_one_that_is_over_is_not():
    silence = Silence(None)
    for at in range(0, 40, 10):
        silence.take(look(float(at), 1), 10.0)
    assert silence.still_stalls(look(40.0, 1), 20.0) is None, "it was no stall yet"
    assert silence.stalls(look(40.0, 1))
    assert silence.still_stalls(look(50.0, 1), 60.0) is None
    assert silence.still_stalls(look(60.0, 1), 60.0)
    silence.take(look(70.0, 2), 10.0)
    assert silence.still_stalls(look(80.0, 2), 0.0) is None
    told = Silence(60.0)
    for at in range(0, 70, 10):
        if not told.take(look(float(at), 1), 10.0):
            told.stalls(look(float(at), 1))
    assert told.still_stalls(look(70.0, 1), 0.0) is None, "it was told as a hang"


def test_the_report_has_those_who_are_elsewhere_first_and_is_short():
    found, _ = odd("S" * 30 + "T", {})
    lines = report(found, "20 s")
    assert len(lines) <= 15
    stopped = "is stopped, by a signal or a debugger"
    assert lines[1] == f"  rank 30 (pid 130) {stopped}  <- not where the others are"
    assert report(found, "")[0] == "where the ranks are:"
    assert lines[-1] == "  and 19 more"
