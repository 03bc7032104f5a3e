"""No secret that a job has in any text reaches the disk, a report, a notification or the API."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from cases import slow
from runs import program, ran

import saferun

SECRET = "hf_" + "aB3dE5fG7hJ9kL1m" + "N3pQ5rS7"  # without its numbers it has no form
FORMS = (SECRET, re.sub("[0-9]+", "N", SECRET))  # the second is a fingerprint's
PARTS = [form[at : at + 12] for form in FORMS for at in range(len(form) - 11)]


def leaks(text: str) -> list[str]:
    return [part for part in PARTS if part in text]


@pytest.mark.parametrize("long", ["60", *slow("0", "95")])
def test_a_secret_in_every_text_of_a_job_is_nowhere_afterwards(tmp_path, long):
    script, place = tmp_path / "job.py", tmp_path / "events"
    shutil.copy(program("plants_secrets"), script)
    told = [sys.executable, program("keeps_event"), str(place)]
    argv = ["--profile=cpu", "--set=launcher=python", f"--set=env.MY_API_KEY={SECRET}"]
    argv += ["--set=hooks.optuna.mode=on", "--set=retry.backoff_s=[0, 0]"]
    argv += [f"--set=notify.command={json.dumps(told)}", f"--set=retry.resume_args=[{SECRET}]"]
    argv += [str(script), long, "--hf-token", SECRET]
    job = ran(tmp_path, *argv, env={"PLANTED": SECRET}, status=1)
    ended = job.events("ended")
    assert [event["kind"] for event in ended] == ["no-failure", "user-exception"]
    files = [path for path in job.journal.rglob("*") if path.is_file()]
    assert {"trials.jsonl", "plan.json", "attempt-2.stderr"} <= {p.name for p in files}
    kept = {str(path): path.read_text(errors="replace", encoding="utf-8") for path in files}
    for form in (["--markdown"], ["--html", "-"], ["--json"]):
        kept[f"report {form}"] = job.ask("runs", "report", job.journal.name, *form)
    for form in ([], ["--json"], ["--csv"]):
        kept[f"show {form}"] = job.ask("runs", "show", job.journal.name, *form)
    kept["saferun's own lines"] = "\n".join(job.messages())
    kept["notify"] = place.read_text(encoding="utf-8")
    assert {name: found for name, text in kept.items() if (found := leaks(text))} == {}


def test_what_the_api_returns_has_no_secret(tmp_path):
    script = tmp_path / "job.py"
    shutil.copy(program("plants_secrets"), script)
    result = saferun.run(
        [script, "60", "--hf-token", SECRET],
        profile="cpu",
        settings={"launcher": "python", "hooks.optuna.mode": "on"},
        run_dir=tmp_path / "runs",
        env={**os.environ, "PLANTED": SECRET},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert "bad token ***" in result.diagnosis.root_line
    assert leaks(repr(result) + str(saferun.RunError(result))) == []
