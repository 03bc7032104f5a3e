"""A training whose loss is not a number any more: said once, or ended and gone on from before."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from cases import slow
from runs import PYTHON, program, ran
from sandbox import shell, text_of

FAST = {"command": [sys.executable, program("fast_watch")]}
KEEP = ["--set=watch.mode=off"]
ENDED = ["--set=watch.loss=end"]


def training(folder: Path, *more: str) -> list[str]:
    """Return a training that resumes from the checkpoints in a folder."""
    # So slow that the watch has looked before the first loss that is no number.
    job = [
        program("diverging"),
        "36",
        str(folder),
        "--pace=0.1",
        *(["--stays"] if ENDED[0] in more else []),
    ]
    pattern = f"--set=retry.resume.checkpoints={folder}/step-*.json"
    resume = '--set=retry.resume.args=["--resume", "{checkpoint}"]'
    return [*PYTHON, *KEEP, pattern, resume, *more, *job]


def test_a_loss_that_is_no_number_is_said_once_with_the_checkpoint_before(tmp_path):
    (tmp_path / "told").mkdir()
    told = f"cat >> {shell(tmp_path / 'told' / 'events')}"
    notify = f"--set=notify.command={json.dumps(['sh', '-c', told])}"
    job = ran(tmp_path, *training(tmp_path, notify, "--set=notify.on=[loss]"), **FAST)
    (event,) = job.events("loss")
    (line,) = (line for line in job.messages() if "the loss is nan" in line)
    shown, watched = job.ask("runs", "show", "last"), job.ask("runs", "report", "last")
    assert "the loss is nan since step 20 (1.810 at step 19); the newest checkpoint before" in line
    assert (event["value"], event["step"], event["good_step"]) == ("nan", 20, 19)
    saved = Path(event["checkpoint"])
    assert json.loads(text_of(saved))["step"] <= 19
    assert saved.name in line
    (told,) = map(json.loads, text_of(tmp_path / "told" / "events").splitlines())
    assert (told["event"], told["step"], told["checkpoint"]) == ("loss", 20, str(saved))
    for page in (shown, watched):
        assert "the loss is nan since step 20" in page


@pytest.mark.parametrize("way", ["live", *slow("script")])
def test_an_attempt_that_is_ended_goes_on_from_before_it(tmp_path, way):
    words, options = [*training(tmp_path, *ENDED), "--heals"], FAST
    if way == "script":
        at = words.index(program("diverging"))
        make = [sys.executable, "-m", "saferun", "gen-shell", *words[:at], "-o", "run.sh", "--"]
        subprocess.run([*make, *words[at:], "--pace=0.3"], cwd=tmp_path, check=True)
        words, options = [], {"command": ["bash", "run.sh"]}
    job = ran(tmp_path, *words, **options)
    first, last = job.events("ended")
    shown = job.ask("runs", "show", "last")
    assert (first["kind"], first["action"], last["status"]) == ("loss-not-finite", "again", 0)
    assert (first["ended_by"], last["ended_by"]) == ("loss", "job")
    assert "end       its loss is not a number" in shown
    (line,) = (line for line in job.messages() if "attempt 2 goes on from" in line)
    begun = int(shlex.split(line.partition("(step ")[2].replace(")", " "))[0].rstrip(";"))
    assert 0 < begun < 20
    assert f"step {begun}: loss" in job.out


def test_the_same_step_again_stops_the_run(tmp_path):
    job = ran(tmp_path, *training(tmp_path, *ENDED), **FAST, status=None)
    kinds = [(e["kind"], e["action"]) for e in job.events("ended")]
    assert kinds == [("loss-not-finite", "again"), ("loss-not-finite", "stop")]
    assert "not tried again: the loss is not a number at the same step again" in job.err


def test_a_single_attempt_is_ended_too(tmp_path):
    job = ran(tmp_path, *training(tmp_path, *ENDED, "--retries=0"), **FAST, status=None)
    assert "(loss-not-finite" in job.err
