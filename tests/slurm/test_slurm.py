"""Files of `gen-shell --slurm`, run by a real Slurm of three nodes (cluster.py)."""

import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing, standing
from helpers import until
from repo import ROOT
from rights import needs
from sandbox import SAFERUN, Sandbox, output, text_of, write

from saferun.export import sbatch

pytestmark = [pytest.mark.slurm, needs("make networks", "become others")]

HERE = Path(__file__).resolve().parent
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    place = tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")  # slurm.conf takes no blanks
    with place as name, standing(Path(name) / "cluster") as stands:
        yield stands


class User(Sandbox):
    """Somebody who submits jobs from a directory of his own."""

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self.cluster, self.place = cluster, place
        (place / "tmp").mkdir()
        super().__init__(place, cwd=place / "a place", TMPDIR=str(place / "tmp"))

    def generates(self, *argv: str) -> None:
        own = ("--slurm", "--profile", "cpu", "-o", "job.sh")
        output(*SAFERUN, "gen-shell", *own, *argv, env=self.environ, cwd=self.cwd)

    def submits(self, *argv: str) -> str:
        messages = self.slurm("sbatch", "--parsable", *argv)
        return messages.split(";")[0].strip()

    def slurm(self, *argv: str) -> str:
        return self.cluster.run(*argv, cwd=self.cwd, env=self.environ)

    def fact(self, job: str, name: str) -> str:
        reported = self.slurm("scontrol", "-o", "show", "job", job)
        return next(w for w in reported.split() if w.startswith(f"{name}=")).partition("=")[2]

    def waits_for(self, what: Callable[[], object], within_s: float = 400) -> None:
        until(what, self.logs, within_s)

    def waits_for_state(self, job: str, *states: str) -> str:
        self.waits_for(lambda: self.fact(job, "JobState") in states)
        return self.fact(job, "JobState")

    def waits_for_end(self, job: str) -> str:
        return self.waits_for_state(job, *OVER)

    def lets_begin(self, job: str) -> None:
        """A job that was queued again begins two minutes later, if nobody helps.

        At once is too soon: a node takes no credential from the second in which it revoked the
        last one.
        """
        self.waits_for_state(job, "PENDING")
        self.slurm("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def saves_and_goes_on(self, name: str, because: str) -> str:
        """Submit what needs more than its time; see that it saves, and goes on; return the job."""
        job, script = self.submits("job.sh"), self.cwd / "job.py"
        self.waits_for(lambda: "saved step" in self.log(f"job-{job}-*.out"))
        saved = int(text_of(self.cwd / f"{name}.step"))
        assert f"saved step {saved} because of {because}" in self.logs()
        assert self.logs().count("saved step") == 1
        quicker = text_of(script).replace("0.1", "0.0001")
        write(script, quicker)
        self.lets_begin(job)
        assert self.waits_for_end(job) == "COMPLETED", self.logs()
        assert f"begins at step {saved}\n" in self.logs()
        assert self.left_behind() == []
        return job

    def log(self, pattern: str) -> str:
        return "".join(text_of(path) for path in sorted(self.cwd.glob(pattern)))

    def logs(self) -> str:
        return "\n".join(f"=== {p.name}\n{text_of(p)}" for p in sorted(self.cwd.glob("*.out")))

    def left_behind(self) -> list[str]:
        """What lives on of a job, and what lies around."""
        reported = self.slurm("ps", "-eo", "args").splitlines()
        signs = ("job.py", "torchrun", "saferun", "slurm_script")
        mine = [line for line in reported if any(sign in line for sign in signs)]
        files = [*(self.place / "tmp").glob("saferun*"), *self.cwd.glob("saferun-slurm-*")]
        return [*mine, *map(str, files)]


@pytest.fixture
def user(cluster: Cluster, tmp_path: Path) -> Iterator[User]:
    user = User(cluster, tmp_path)
    shutil.copy(HERE / "job.py", user.cwd)
    yield user
    cluster.run("scancel", "--user", "root")
    user.waits_for(lambda: not user.slurm("squeue", "--noheader"))


def test_two_nodes_train_the_example_and_each_has_its_log(user):
    shutil.copy(ROOT / "examples" / "train_gpt.py", user.cwd)
    size = ["--steps", "10", "--layers", "1", "--width", "16", "--block", "16"]
    user.generates("--nodes", "2", "--", "torchrun", "train_gpt.py", *size, "--out", "my out")
    job = user.submits("job.sh")
    assert user.waits_for_end(job) == "COMPLETED", user.logs()
    assert "2 x cpu" in user.logs()
    assert user.logs().count("done step=10") == 1
    for node in ("n1", "n2"):
        assert "saferun: profile cpu" in user.log(f"train_gpt-{job}-{node}.out")
    assert (user.cwd / "my out" / "checkpoint.pt").is_file()
    assert user.left_behind() == []


def test_nodes_meet_again_after_a_rank_of_one_is_killed(user):
    user.generates("--nodes", "2", "--", "job.py", "gloo", "9", "kill", "n2")
    job = user.submits("--nodelist=n[1-2]", "job.sh")
    assert user.waits_for_end(job) == "COMPLETED", user.logs()
    assert user.fact(job, "Restarts") == "0"
    for node in ("n1", "n2"):
        assert f"on {node}: done at step 9" in user.log(f"job-{job}-{node}.out"), user.logs()
    assert "attempt 1 failed" in user.log(f"job-{job}-n2.out")
    assert user.left_behind() == []


def test_the_recipe_for_srun_in_the_documentation_brings_nodes_back(user):
    text = text_of(ROOT / "docs" / "many-machines.md")
    recipe = text[text.index("    #SBATCH --nodes=2") : text.index("`--kill-on-bad-exit=0` lets")]
    for theirs, here in (
        (" --gpus-per-node=8 --cpus-per-task=32", " --cpus-per-task=1"),
        ("per-node gpu", "per-node 1 --profile cpu"),
        ("train.py", "job.py gloo 9 kill n2"),
    ):
        assert recipe.count(theirs) == 1
        recipe = recipe.replace(theirs, here)
    lines = [line.removeprefix("    ") for line in recipe.splitlines()]
    write(user.cwd / "recipe.sh", "\n".join(["#!/bin/bash", *lines, ""]))
    job = user.submits("--nodelist=n[1-2]", "recipe.sh")
    assert user.waits_for_end(job) == "COMPLETED", user.logs()
    for node in ("n1", "n2"):
        assert f"on {node}: done at step 9" in user.logs()
    assert user.logs().count("saferun: attempt 2 succeeded") == 2, user.logs()
    assert user.left_behind() == []


@pytest.mark.timeout(400)
@pytest.mark.slow  # Slurm signals up to a minute early: the limit has to be longer than that
def test_a_job_whose_time_is_over_goes_on_from_its_checkpoint(user):
    user.generates("--time", "2", "--sbatch=--signal=B:USR2@45", "--", "job.py", "limit", "1500")
    job = user.saves_and_goes_on("limit", "SIGUSR2")  # it needs longer than its time
    assert user.fact(job, "Restarts") == "1"
    assert "done at step 1500" in user.logs()


def test_a_preempted_job_goes_on_from_the_checkpoint_that_it_is_told(user):
    for name in ("resumable_job.py", "strike.py"):
        shutil.copy(ROOT / "tests" / "programs" / "faults" / name, user.cwd)
    settings = ["--set", "retry.resume.checkpoints={--out}/checkpoint-*.zip"]
    settings += ["--set", 'retry.resume.args=["--resume={checkpoint}"]']
    user.generates(*settings, "--", "resumable_job.py", "--out=out", "--fault=1:12:SIGCONT")
    job = user.submits("--nodelist=n1", "--exclusive", "job.sh")
    user.waits_for(lambda: "\nstep 12 " in user.logs())
    urgent = ("--partition=urgent", "--nodelist=n1", "--exclusive", "--output=urgent")
    user.submits(*urgent, "--wrap=hostname")
    user.lets_begin(job)
    assert user.waits_for_end(job) == "COMPLETED", user.logs()
    assert user.fact(job, "Restarts") == "1"
    assert re.search(r"^saferun: attempt 1 goes on from out/checkpoint-10.zip", user.logs(), re.M)
    assert "\nresumed at step 10\n" in user.logs()
    assert user.logs().count("\ndone step=20") == 1
    assert user.left_behind() == []


@pytest.mark.timeout(700)
@pytest.mark.slow
def test_a_rank_that_needs_a_minute_to_save_has_it_before_the_limit(user):
    user.environ["SAVE_S"] = "60"  # twice what torchrun gives ranks that it ends
    # The last minute of the notice is for queueing the job again.
    user.generates("--time", "5", "--sbatch=--signal=B:USR2@180", "--", "job.py", "long", "9000")
    user.saves_and_goes_on("long", "SIGUSR2")


def test_a_preempted_job_is_queued_again_by_slurm_alone(user):
    user.generates("--nodes", "2", "--", "job.py", "preempted", "300")
    job = user.submits("--nodelist=n[1-2]", "--exclusive", "job.sh")
    user.waits_for(lambda: user.log("preempted.step"))
    urgent = ("--partition=urgent", "--nodelist=n[1-2]", "--exclusive", "--output=urgent")
    user.submits(*urgent, "--wrap=hostname")
    user.waits_for_state(job, "PENDING")
    assert "saved step" in user.log(f"job-{job}-n1.out"), user.logs()
    assert "because of SIGTERM" in user.log(f"job-{job}-n2.out")
    assert "queued again" not in user.logs()
    write(user.cwd / "preempted.step", "299")
    user.lets_begin(job)
    assert user.waits_for_end(job) == "COMPLETED", user.logs()
    assert user.fact(job, "Restarts") == "1"
    assert user.left_behind() == []


def test_a_job_that_is_asked_to_end_ends_and_is_not_queued_again(user):
    user.generates("--nodes", "2", "--", "job.py", "asked", "300")
    job = user.submits("job.sh")
    user.waits_for(lambda: user.log("asked.step"))
    user.slurm("scancel", "--signal=TERM", job)
    assert user.waits_for_end(job) == "FAILED"
    assert "saved step" in user.log(f"job-{job}-n1.out")
    assert user.fact(job, "Restarts") == "0"
    assert user.left_behind() == []


def test_a_job_goes_on_without_the_node_whose_hardware_failed(user):
    user.generates("--nodes", "2", "--", "job.py", "hardware", "6", "xid", "n2")
    job = user.submits("job.sh")
    user.waits_for(lambda: user.fact(job, "ExcNodeList") == "n2")
    user.lets_begin(job)
    assert user.waits_for_end(job) == "COMPLETED", user.logs()
    assert user.fact(job, "NodeList") == "n[1,3]"
    assert "the hardware of n2 failed: the job is queued again, without n2" in user.logs()
    assert user.left_behind() == []


@pytest.mark.timeout(900)
@pytest.mark.slow
@pytest.mark.parametrize("node", ["n1", "n2"])  # the script's own, and another one
def test_a_job_goes_on_without_a_node_that_is_set_down(user, node):
    shutil.copy(ROOT / "examples" / "train_gpt.py", user.cwd)
    size = ["--steps", "300", "--layers", "1", "--width", "16", "--block", "16", "--log-every=1"]
    size += ["--save-every=20", "--eval-every=5000", "--resume"]
    user.generates("--nodes", "2", "--", "train_gpt.py", *size)
    job = user.submits("job.sh")
    user.waits_for(lambda: "\nstep 30 " in user.log(f"train_gpt-{job}-*.out"))
    user.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=a test")
    try:
        user.lets_begin(job)
        assert user.waits_for_end(job) == "COMPLETED", user.logs()
    finally:
        user.slurm("scontrol", "update", f"nodename={node}", "state=resume")
    left = "n[2-3]" if node == "n1" else "n[1,3]"
    assert (user.fact(job, "NodeList"), user.fact(job, "Restarts")) == (left, "1")
    log = user.log(f"train_gpt-{job}-n*.out")
    assert len(re.findall(r"^resumed at step \d+0$", log, re.MULTILINE)) == 1, log
    assert log.count("done step=300 ") == 1, log
    printed = set(re.findall(r"^step (\d+) loss ([\d.]+) ", log, re.MULTILINE))
    assert len(printed) == 300, sorted(printed)  # also of a step that was done twice
    assert user.left_behind() == []


def test_a_mistake_of_the_scripts_own_is_not_tried_again(user):
    user.generates("--nodes", "2", "--", "job.py", "mistake", "3000", "raise", "n1")
    job = user.submits("--nodelist=n[1-2]", "job.sh")
    assert user.waits_for_end(job) == "FAILED"
    for node in ("n1", "n2"):
        log = user.log(f"job-{job}-{node}.out")
        assert re.search(r"^saferun: the run failed: .* on rank \d, host n1\)$", log, re.M), log
    assert user.fact(job, "ExitCode") == "1:0"
    assert user.fact(job, "Restarts") == "0"
    assert "queued again" not in user.logs()
    assert user.left_behind() == []


def test_each_task_of_an_array_is_a_job_of_its_own(user):
    user.generates("--gpus-per-node", "1", "--", "job.py")
    job = user.submits("--array=0-1", "job.sh", "array", "1")
    user.waits_for(lambda: not user.slurm("squeue", "--noheader"))
    for task in (0, 1):
        assert "done at step 1" in user.log(f"job-{job}_{task}-*.out"), user.logs()
        assert user.fact(f"{job}_{task}", "JobState") == "COMPLETED"
    assert user.left_behind() == []


@pytest.mark.parametrize(
    "value",
    [
        "two words",
        'it\'s "quoted"',
        "$(touch touched) `touch touched` $HOME",
        "a#b # c",
        "back\\slash \\",
        "ünï",
        " blanks around ",
    ],
)
def test_slurm_reads_a_directive_as_it_is_meant(user, value):
    script = f"#!/bin/sh\n#SBATCH --comment={sbatch.quote(value)}\nexit\n"
    write(user.cwd / "quoting.sh", script)
    job = user.submits("--hold", "quoting.sh")
    reported = user.slurm("squeue", "--noheader", "-j", job, "--format=[%k]")
    assert reported == f"[{value}]\n"
    assert not (user.cwd / "touched").exists()


# --- the plain script ----------------------------------------------------------------------------


def test_nodes_of_a_plain_script_meet_again_after_a_rank_of_one_is_killed(user):
    user.generates("--plain", "--nodes", "2", "--", "job.py", "gloo", "9", "kill", "n2")
    job = user.submits("--nodelist=n[1-2]", "job.sh")
    assert user.waits_for_end(job) == "COMPLETED", user.logs()
    for node in ("n1", "n2"):
        log = user.log(f"job-{job}-{node}.out")
        assert f"on {node}: done at step 9" in log, user.logs()
        assert "attempt 2 of 3 starts" in log, user.logs()
    assert user.left_behind() == []
    assert list((user.place / "tmp").glob("tmp.*")) == []


def test_a_mistake_ends_the_job_of_a_plain_script(user):
    user.generates("--plain", "--nodes", "2", "--", "job.py", "gloo", "9", "raise", "n2")
    job = user.submits("--nodelist=n[1-2]", "job.sh")
    assert user.waits_for_end(job) == "FAILED", user.logs()
    assert "attempt 2" not in user.log(f"job-{job}-n2.out")
    assert user.left_behind() == []


@pytest.mark.slow
def test_a_plain_script_whose_time_is_over_saves_and_goes_on_from_its_checkpoint(user):
    user.generates("--plain", "--time", "3", "--", "job.py", "long", "9000")
    user.saves_and_goes_on("long", "SIGTERM")
