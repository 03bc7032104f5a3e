"""Which checkpoint the next attempt goes on from, what is said of it, and what a failure costs."""

import json
import os
from pathlib import Path

import pytest
from outcomes import outcome

from saferun.diagnosis.work_lost import Saved
from saferun.keeper import protocol
from saferun.model import Checkpoint
from saferun.planning import inputs, request
from saferun.planning.torchrun.torchrun_args import ranks
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.changes import resumption
from saferun.supervise.changes.resumption import Resumption
from saferun.system import checkpoints

FAILED = outcome(1, 137, 600.0, 600.0, kind="segfault", verdict="retry", last_step=30)
ARGS = 'retry.resume.args=["--from={step}"]'


def ended(status: int = 9) -> AttemptEnd:
    """How an attempt ended, with this status as waitpid(2) gives it."""
    report = protocol.Ended(status, 0, [], (b"", b""))
    return AttemptEnd(report, 1000.0, 600.0, (), interrupted=False, ended_by="job")


class ResumableJob:
    """A run in a directory, its checkpoints, and what was said."""

    def __init__(self, folder: Path, *sets: str, args: str = ARGS, **environ: str) -> None:
        self.out = folder / "out"
        self.out.mkdir()
        self.said: list[str] = []
        home = {"HOME": str(folder), "PATH": os.environ["PATH"], **environ}
        argv = ["--profile=cpu", "--set=launcher=python", f"--set={args}"]
        argv += ["--set=retry.resume.checkpoints={HOME}/out/ckpt-*.bin", *sets, "t.py"]
        self.gathered = inputs.gather(request.read(argv, home), home, str(folder))
        self.plan = self.gathered.plan()
        self.environ = home

    def save(self, step: int | str, at_s: float, data: bytes = b"weights of it") -> str:
        path = self.out / f"ckpt-{step}.bin"
        path.write_bytes(data)
        os.utime(path, (at_s, at_s))
        return str(path)

    def run(self) -> Resumption:
        return Resumption(self.gathered, self.plan, self.said.append)


@pytest.fixture
def job(tmp_path: Path) -> ResumableJob:
    return ResumableJob(tmp_path)


def test_what_is_not_complete_or_gives_no_step_is_passed_over_and_said_once(job):
    run = job.run()
    job.save(10, 1100.0)
    empty = job.save(20, 1200.0, b"")
    nameless = job.save("last", 1300.0)
    assert [run.checkpoint(n).step for n in (2, 3)] == [10, 10]
    assert sorted(line for line in job.said if "is skipped" in line) == [
        f"{empty} is skipped: it is empty",
        f"{nameless} is skipped: {{step}} in retry.resume.args has no value",
    ]


def test_a_checkpoint_of_fewer_ranks_than_the_job_has_is_not_complete(job):
    folder = job.out / "ckpt-20.bin"
    folder.mkdir()
    for name in ("model.bin", "rng_state_0.pth"):
        (folder / name).write_bytes(b"weights of it")
    found = []
    for processes in ("1", "2"):
        options = job.plan.options._replace(processes=processes)
        first = job.plan._replace(launcher="torchrun", options=options)
        environ = {**job.environ, "SLURM_RESTART_COUNT": "1"}
        run = Resumption(job.gathered._replace(environ=environ), first, job.said.append)
        found.append(run.checkpoint(1))
    assert [one and one.step for one in found] == [20, None]


def test_a_failure_costs_what_came_after_the_checkpoint_and_the_next_attempt_says_so(job):
    run = job.run()
    newest = job.save(10, 1590.0)
    last = run.judged(FAILED, job.plan, ended())
    lost = last.lost_work
    assert (last.progressed, lost.steps, lost.s, lost.checkpoint) == (True, 20, 10.0, newest)
    assert last.has_room is last.falls_back is False
    assert not run.judged(FAILED, job.plan, ended()).progressed  # nothing further
    run.judged(FAILED._replace(last_step=None), job.plan, ended())
    run.checkpoint(2)
    assert job.said[-1].endswith("(step 10); 10 s of work are done again")
    run.judged(FAILED, job.plan, ended())
    run.checkpoint(2)
    assert job.said[-1].endswith("(step 10); 20 steps, 10 s of work are done again")
    assert run.judged(FAILED, job.plan, ended(0)).lost_work is None


@pytest.mark.parametrize(("began_s", "further"), [(None, False), (1590.0, False), (1500.0, True)])
def test_where_names_have_no_number_a_newer_file_than_the_first_is_further(
    tmp_path, began_s, further
):
    job = ResumableJob(tmp_path, args="retry.resume.args=[]")
    run = job.run()
    path = job.save("last", 1590.0)
    began = None if began_s is None else Checkpoint(path, -1, began_s)
    last = run.judged(FAILED, job.plan._replace(checkpoint=began), ended())
    assert last.progressed is further
    run.checkpoint(2)
    assert job.said[-1].startswith(f"attempt 2 goes on from {path}; ")


def test_how_often_to_save_is_said_once_enough_is_known(job, monkeypatch):
    monkeypatch.setattr(
        checkpoints, "write_time_s", lambda path, environ: float(environ["WRITE_S"])
    )
    job.environ["WRITE_S"] = "10"
    run = job.run()
    for number in range(3):
        job.save(number, 1000.0 + 3600 * number)
    run.judged(FAILED, job.plan, ended())
    assert run.advice([7200.0] * 2) == ""
    assert run.advice([7200.0] * 3) == (
        "3 failures had 0 s of work done again; a checkpoint every 6 min 13 s would lose the "
        "least (Young/Daly, from how long writing one takes)"
    )
    monkeypatch.setattr(checkpoints, "write_time_s", lambda path, environ: None)
    assert run.advice([7200.0] * 3) == ""


def test_without_a_place_or_with_a_fault_of_ours_nothing_resumes(tmp_path, monkeypatch):
    job = ResumableJob(tmp_path, "--set=retry.resume.checkpoints={--out}/x")
    run = job.run()
    unknown = "retry.resume.checkpoints: {--out} has no value here: nothing resumes"
    assert job.said == [unknown]
    assert (run.checkpoint(2), run.advice([1.0] * 3)) == (None, "")
    assert run.judged(FAILED, job.plan, ended()) == FAILED
    other = ResumableJob(tmp_path / "out")
    run = other.run()
    monkeypatch.setattr(checkpoints, "find", lambda pattern: {}["a"])
    assert run.checkpoint(2) is None
    assert run.judged(FAILED, other.plan, ended()) == FAILED
    fault = "the checkpoints could not be looked at, a fault of saferun's own (KeyError: 'a')"
    assert other.said == [fault, fault]


def test_what_another_process_has_saved_since_is_found(job):
    policy, environ = job.plan.settings.retry.resume, job.environ
    relative = policy._replace(checkpoints="out/{NAME}-*.bin")
    older = job.save(10, 1100.0)
    job.save(20, 1200.0, b"")
    for began_s, found in ((1100.0, older), (1150.0, None)):
        one = resumption.saved_since(policy, (), environ, "/nowhere", began_s)
        assert (one and one.path) == found
    home = job.environ["HOME"]
    found = resumption.saved_since(relative, (), {**environ, "NAME": "ckpt"}, home, 0.0)
    assert found.path == older
    assert resumption.saved_since(relative, (), environ, home, 0.0) is None


def test_the_start_of_an_attempt_is_no_work_that_is_lost(job, tmp_path):
    head = {"v": 1, "at": 1090.0, "pid": 7, "rank": 0, "hook": "init", "outcome": "applied"}
    (tmp_path / "a1-r0-rank0-pid7.jsonl").write_text(json.dumps(head) + "\n", encoding="utf-8")
    identity = job.gathered.identity._replace(receipts=str(tmp_path))
    job.gathered = job.gathered._replace(identity=identity)
    assert job.run().judged(FAILED, job.plan, ended()).lost_work.s == 510.0


@pytest.mark.parametrize(
    ("processes", "count"),
    [("3", 3), ("cpu", os.cpu_count()), ("gpu", 1), ("auto", os.cpu_count()), (None, 1)],
)
def test_the_ranks_of_this_machine_are_counted_where_they_are_known(job, processes, count):
    plan = job.plan._replace(options=job.plan.options._replace(processes=processes))
    assert ranks(plan) == 1  # plain python
    assert ranks(plan._replace(launcher="torchrun")) == count


def test_the_checkpoints_of_an_attempt_are_noted_with_their_times_and_steps(job):
    job.save(10, 900.0)  # of an earlier attempt
    run = job.run()
    for step, at_s in ((20, 1100.0), (30, 1200.5)):
        job.save(step, at_s)
    for status in (9, 0):
        last = run.judged(FAILED, job.plan, ended(status))
        assert last.saved == (Saved(100.0, 20), Saved(200.5, 30))
