"""The examples of shell/, run: before and after start the same jobs."""

import json
import sys

import pytest
from repo import ROOT
from sandbox import shell_program
from scripts import Machine

EXAMPLES = ROOT / "shell" / "examples"


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.program("saferun", shell_program(sys.executable, "-m", "saferun"))
    return machine


def jobs(machine: Machine, label: str) -> list[list[str]]:
    path = machine.records(label) / "all"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["speedrun", "run1000"])
def test_before_and_after_start_the_same_jobs(machine, name):
    environ = {"OUT": "out here", "GPUS": "4"}
    before = machine.run(["bash", EXAMPLES / f"{name}-before.sh"], "before", **environ)
    after = machine.run(["bash", EXAMPLES / f"{name}.sh"], "after", **environ)
    assert (before.status, after.status) == (0, 0), after.err
    assert jobs(machine, "after") == jobs(machine, "before")
    assert "--nproc_per_node=4" in jobs(machine, "after")[0]


def test_the_plain_twin_starts_the_same_jobs_and_resumes_after_a_crash(machine):
    environ = {"OUT": "out here", "GPUS": "4"}
    before = machine.run(["bash", EXAMPLES / "speedrun-before.sh"], "before", **environ)
    plain = machine.run(["bash", EXAMPLES / "speedrun-plain.sh"], "plain", **environ)
    assert (before.status, plain.status) == (0, 0), plain.err
    assert jobs(machine, "plain") == jobs(machine, "before")
    ends = [{"code": "os.kill(os.getpid(), 9)"}, {}]
    train = EXAMPLES / "train-plain.sh"
    crashed = machine.run(["bash", train, "--standalone", "train.py"], "crashed", ends=ends)
    first = ["--standalone", "train.py"]
    assert (crashed.status, jobs(machine, "crashed")) == (0, [first, [*first, "--resume"]])


def test_the_plain_twin_is_what_its_command_makes(machine):
    done = machine.gen_shell("--check", str(EXAMPLES / "train-plain.sh"))
    assert done.returncode == 0, done.stdout


def test_the_loop_of_before_repeats_a_mistake_and_saferun_does_not(machine):
    ends = [{"stderr": '[rank0]: KeyError: "label"\n', "status": 1}]
    before = machine.run(["bash", EXAMPLES / "run1000-before.sh"], "before", ends=ends, PAUSE="0")
    after = machine.run(["bash", EXAMPLES / "run1000.sh"], "after", ends=ends)
    assert (before.status, after.status) == (1, 1)
    assert len(jobs(machine, "before")) == 20
    assert len(jobs(machine, "after")) == 1


def test_saferuns_attempt_after_a_crash_resumes_as_the_loop_did(machine):
    ends = [{"code": "os.kill(os.getpid(), 9)"}, {}]
    after = machine.run(["bash", EXAMPLES / "run1000.sh"], "after", ends=ends)
    assert after.status == 0, after.err
    assert after.received[2].argv == [*after.received[1].argv, "--resume"]


def test_the_document_shows_a_plain_script_as_its_command_makes_it(machine):
    text = (ROOT / "docs" / "scripts-and-slurm.md").read_text(encoding="utf-8")
    command = text.partition("    saferun gen-shell ")[2].partition(" > run.sh\n")[0]
    assert f"```bash\n{machine.gen_shell(*command.split()).stdout}```\n" in text
