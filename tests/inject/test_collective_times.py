"""Ranks write the times of their collectives when a signal asks, and compute on as before."""

from __future__ import annotations

import stat
from pathlib import Path

import ranks
from repo import source

from saferun.diagnosis import slow_rank
from saferun.inject import contract


def asked(folder: Path, *, watched: bool) -> tuple[ranks.Job, list[str]]:
    """Run two ranks that ask themselves; return the job and the lines that they print."""
    folder.mkdir()
    text = contract.encode(
        run="test",
        attempt=1,
        hooks=ranks.hooks(),
        mitigations=(),
        receipts=str(folder / "receipts"),
        watch=1 if watched else None,
    )
    program = source("inject/asked_for_times")
    job = ranks.launch(folder, program, environ={contract.VARIABLE: text})
    assert (job.code, job.messages()) == (0, []), job.err
    return job, sorted(job.out.splitlines())


def test_a_rank_that_is_asked_writes_its_times_and_dynamo_compiles_nothing_more(tmp_path):
    _, plain = asked(tmp_path / "plain", watched=False)
    _, lines = asked(tmp_path / "watched", watched=True)
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
        (calls,) = times.groups.values()
        assert {call.name for call in calls.values()} == {"all_reduce"}


def test_a_script_that_uses_the_signal_keeps_its_handler(tmp_path):
    program = source("inject/asked_for_times").replace(
        "ASK = 54\n", "ASK = 54\nsignal.signal(ASK, lambda *_: os.write(1, b'mine\\n'))\n"
    )
    (tmp_path / "receipts").mkdir()
    text = contract.encode(
        run="test", attempt=1, hooks=ranks.hooks(), mitigations=(),
        receipts=str(tmp_path / "receipts"), watch=1,
    )  # fmt: skip
    job = ranks.launch(tmp_path, program, environ={contract.VARIABLE: text})
    assert job.code == 0, job.err
    assert job.out.count("mine\n") == 2 * 21
    assert not list((tmp_path / "receipts").glob("*.times"))


def test_a_rank_whose_record_cannot_be_had_says_so_once_and_computes_on(tmp_path):
    broken = (
        "ASK = 54\n"
        "def broken(*args): raise RuntimeError('no record')\n"
        "torch._C._distributed_c10d._dump_fr_trace = broken\n"
        "torch._C._distributed_c10d._dump_nccl_trace = broken\n"
    )
    program = source("inject/asked_for_times").replace("ASK = 54\n", broken)
    (tmp_path / "receipts").mkdir()
    text = contract.encode(
        run="test", attempt=1, hooks=ranks.hooks(), mitigations=(),
        receipts=str(tmp_path / "receipts"), watch=1,
    )  # fmt: skip
    job = ranks.launch(tmp_path, program, environ={contract.VARIABLE: text})
    assert job.code == 0, job.err
    said = "the watch for slow ranks gets no times from this rank (RuntimeError: no record)"
    assert job.err.count(said) == 2, "once a rank"
