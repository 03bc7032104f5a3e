"""Ranks write the times of their collectives when a signal asks, and compute on as before."""

import stat
from pathlib import Path

from ranks import Job
from releases import torch_before
from repo import source

from saferun.diagnosis import slow_rank

PROGRAM = source("inject/asked_for_times")


def test_a_rank_that_is_asked_writes_its_times_and_dynamo_compiles_nothing_more(forks, tmp_path):
    def printed(folder: Path, *, watched: bool) -> list[str]:
        folder.mkdir()
        job: Job = forks.run(folder, PROGRAM, watched=watched)
        assert (job.code, job.messages()) == (0, []), job.err
        return sorted(job.out.splitlines())

    plain = printed(tmp_path / "plain", watched=False)
    lines = printed(tmp_path / "watched", watched=True)
    assert lines[:2] == ["handled", "handled"]
    assert plain[:2] == ["not handled", "not handled"]
    assert lines[2:] == plain[2:], "what Dynamo has seen"
    assert not list((tmp_path / "plain" / "receipts").glob("*.times"))
    files = sorted((tmp_path / "watched" / "receipts").glob("*.times"))
    assert ["-rank0-" in files[0].name, "-rank1-" in files[1].name] == [True, True]
    for file in files:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        times = slow_rank.read(file.read_bytes())
        assert times is not None
        if not torch_before("2.9"):  # torch's recorder knows gloo
            (calls,) = times.groups.values()
            assert {call.name for call in calls.values()} == {"all_reduce"}


def test_a_script_that_uses_the_signal_keeps_its_handler(run_ranks, tmp_path):
    own = "ASK = 54\nsignal.signal(ASK, lambda *_: os.write(1, b'mine\\n'))\n"
    job = run_ranks(PROGRAM.replace("ASK = 54\n", own), watched=True)
    assert job.code == 0, job.err
    assert job.out.count("mine\n") == 2 * 21
    assert not list((tmp_path / "receipts").glob("*.times"))


def test_a_rank_whose_record_cannot_be_had_says_so_once_and_computes_on(run_ranks):
    broken = (
        "ASK = 54\n"
        "def broken(*args): raise RuntimeError('no record')\n"
        "torch._C._distributed_c10d._dump_fr_trace = broken\n"
        "torch._C._distributed_c10d._dump_nccl_trace = broken\n"
    )
    job = run_ranks(PROGRAM.replace("ASK = 54\n", broken), watched=True)
    assert job.code == 0, job.err
    said = "the watch for slow ranks gets no times from this rank (RuntimeError: no record)"
    assert job.err.count(said) == 2, "once a rank"
