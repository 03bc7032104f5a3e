"""`notify`: a command gets the events of a run as JSON, and the run comes to no harm by it."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import slow
from helpers import until
from runs import PYTHON, program, ran, run, small_torchrun
from user_machine import NO_SHM

STAYS = "import signal; print('here', flush=True); signal.pause()"
SECRET = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
CURED = (
    "import os, sys\n"
    f"if os.environ['SAFERUN_ATTEMPT'] == '1':\n    sys.stderr.write({NO_SHM!r})\n    sys.exit(1)\n"
)


def told(place: Path, *act: str, on: str = "[]") -> list[str]:
    """Return the settings by which events are appended to a file."""
    command = [sys.executable, program("keeps_event"), str(place), *act]
    return [f"--set=notify.command={json.dumps(command)}", f"--set=notify.on={on}"]


def events(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]


def test_a_run_that_finishes_says_so_and_its_output_is_its_own(tmp_path):
    place = tmp_path / "events"
    job = ran(tmp_path, *PYTHON, *told(place), "--retries=0", "-c", "print('mine')")
    (event,) = events(place)
    assert (event["schema"], event["event"], event["status"]) == (1, "finished", 0)
    assert (event["run"], event["journal"]) == (job.journal.name, str(job.journal))
    assert event["host"] == os.uname().nodename
    assert job.out == "mine\n"
    assert "nobody" not in job.err


def test_a_mitigation_and_the_end_are_two_events(tmp_path):
    place, script = tmp_path / "events", tmp_path / "train.py"
    script.write_text(CURED, encoding="utf-8")
    argv = ["--profile=cpu", PYTHON[-1], *told(place), str(script)]
    ran(tmp_path, *argv, env=small_torchrun(tmp_path))
    first, last = events(place)
    assert (first["event"], first["kind"], first["verdict"]) == (
        "mitigated",
        "nccl-shm-failed",
        "mitigate",
    )
    assert (first["attempt"], first["mitigations"]) == (1, ["nccl-shm-off"])
    assert "shared memory segment" in first["root_line"]
    assert "with nccl-shm-off" in first["text"]
    assert (last["event"], last["attempt"], last["mitigations"]) == (
        "finished",
        2,
        ["nccl-shm-off"],
    )


def test_only_the_events_that_are_named_are_told_and_no_secret(tmp_path):
    place = tmp_path / "events"
    script = tmp_path / "fails.py"
    script.write_text(f"raise KeyError('{SECRET}')\n", encoding="utf-8")
    argv = [*PYTHON, *told(place, on="[failed]"), str(script)]
    ran(tmp_path, *argv, env={"HF_TOKEN": SECRET}, status=1)
    (event,) = events(place)
    assert (event["event"], event["kind"], event["status"]) == ("failed", "user-exception", 1)
    assert "KeyError" in event["root_line"]
    shown = event["user_frame"]
    assert shown.startswith(f"{script}:1  raise KeyError(")
    assert shown in event["text"]
    assert SECRET not in place.read_text(encoding="utf-8")


def test_a_command_that_fails_costs_one_line(tmp_path):
    for act, line in (("fail", "ended with status 1: the address is wrong"), ("leave", None)):
        job = ran(tmp_path, *PYTHON, *told(tmp_path / act, act), "-c", "pass")
        said = [one for one in job.messages() if "notify" in one]
        assert len(said) == (line is not None)
        assert line is None or line in said[0]
    job = ran(tmp_path, *PYTHON, "--set=notify.command=[/no/such]", "-c", "pass")
    assert "notify: `/no/such` cannot be run: No such file" in job.err


@pytest.mark.slow
def test_a_command_that_does_not_end_is_ended(tmp_path):
    job = ran(tmp_path, *PYTHON, *told(tmp_path / "events", "stay"), "-c", "pass")
    assert "did not end within 10 s" in job.err


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow(signal.SIGINT)])
def test_a_command_that_does_not_end_keeps_no_run_and_outlives_none(tmp_path, number):
    place = tmp_path / "events"
    with run(tmp_path, *PYTHON, *told(place, "stay"), "-c", "pass") as job:
        until(lambda: place.exists() and place.read_text(encoding="utf-8"), "the command was told")
        job.process.send_signal(number)
        job.end()
        job.nothing_lives()
    assert "did not end within" not in job.err


def test_who_asks_a_run_to_end_is_told_nothing(tmp_path):
    place = tmp_path / "events"
    with run(tmp_path, *PYTHON, *told(place), "-c", STAYS) as job:
        job.process.stdout.readline()
        job.process.send_signal(signal.SIGTERM)
        job.end()
    assert not place.exists()


def test_several_workers_end_in_one_event(tmp_path):
    place = tmp_path / "events"
    code = "import os; raise SystemExit(int(os.environ['SAFERUN_WORKER']))"
    ran(tmp_path, *PYTHON, "--set=workers=2", *told(place), "-c", code, status=1)
    (event,) = events(place)
    assert (event["event"], event["worker"]) == ("failed", None)
    assert event["reason"].startswith("worker 1: ")


@pytest.mark.slow
def test_a_job_that_hangs_is_told_of(tmp_path):
    place = tmp_path / "events"
    watch = ["--set=watch.silence_s=2", *told(place, on="[hang]")]
    with run(tmp_path, *PYTHON, *watch, "-c", STAYS) as job:
        until(lambda: place.exists() and place.read_text(encoding="utf-8"), "the hang is told of")
        job.process.send_signal(signal.SIGTERM)
        job.end()
    (event,) = events(place)
    assert (event["event"], event["attempt"]) == ("hang", 1)
    assert event["silent_s"] >= 2
