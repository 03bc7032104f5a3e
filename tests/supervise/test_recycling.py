"""A process under plain python that asks to be replaced, in real runs."""

import os
import stat

import pytest
from repo import PROGRAMS
from runs import PYTHON, ran, run

from saferun.cli.runs import runs_view
from saferun.journal import reader, time_spent
from saferun.journal.attempts import attempts

PROGRAM = str(PROGRAMS / "supervise" / "recycled.py")
ASKED = str(PROGRAMS / "supervise" / "recycle_when_asked_to_end.py")
REPLACED = "saferun: process replaced: one piece is enough"


def test_replaced_processes_are_no_failures_and_share_a_directory(tmp_path):
    job = ran(tmp_path, *PYTHON, PROGRAM, "13")
    assert job.out == "".join(f"piece of attempt {n}\n" for n in range(1, 14))
    assert job.messages()[1:] == [REPLACED] * 12
    asked = job.events("recycled")
    assert [event["attempt"] for event in asked] == list(range(1, 13))
    assert asked[0]["why"] == "one piece is enough"
    assert (asked[0]["kind"], asked[0]["progress"]) == ("cuda-launch-failure", 1)
    assert {event["delay_s"] for event in job.events("ended")} == {0}
    state = job.journal / "state"
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert not list(job.journal.glob("attempt-1.*"))
    found = reader.named(str(job.journal.parent), "last", 0.0)
    tried = attempts(found)
    assert [attempt.replaced for attempt in tried] == [True] * 12 + [False]
    shown = runs_view.as_text(
        found, tried, reader.read_plan(found.path), time_spent.read(found, tried, 0.0), 0.0, {}
    )
    assert "replaced  12 processes, as asked; not shown" in shown
    assert "\nattempt 13: " in shown
    assert "\nattempt 12: " not in shown


def test_a_replacement_without_progress_is_a_failure_of_its_kind(tmp_path):
    job = ran(tmp_path, *PYTHON, PROGRAM, "13", "0", status=77)
    ended = job.events("ended")
    assert {event["kind"] for event in ended} == {"cuda-launch-failure"}
    assert len(ended) <= 3
    assert not job.events("recycled")
    assert REPLACED not in job.messages()


def test_counted_work_renews_the_budget_of_a_process_that_is_killed(tmp_path):
    job = ran(tmp_path, *PYTHON, PROGRAM, "8", "-1")
    assert [event["status"] for event in job.events("ended")] == [137] * 7 + [0]


@pytest.mark.parametrize("planted", ["{}", "not json", '{"why": 3, "kind": "", "progress": 1}'])
def test_status_77_without_a_request_is_a_failure(tmp_path, planted):
    (tmp_path / "job.py").write_text(
        "import os, sys\n"
        "from _saferun.inject import contract, hook_runner\n"
        "here = hook_runner.current(os.environ[contract.VARIABLE])\n"
        f"here.write_file(contract.RECYCLE, {planted.encode()!r})\n"
        "sys.exit(77)\n",
        encoding="utf-8",
    )
    job = ran(tmp_path, *PYTHON, "job.py", status=77)
    assert len(job.events("ended")) == 1
    assert not job.events("recycled")


def test_without_a_journal_no_process_can_ask(tmp_path):
    (tmp_path / "job.py").write_text(
        "import os\n"
        "from _saferun.inject import contract, hook_runner\n"
        "here = hook_runner.current(os.environ[contract.VARIABLE])\n"
        "print(here.state, here.recycle('why', progress=1))\n",
        encoding="utf-8",
    )
    (tmp_path / "file").touch()
    nowhere = {"SAFERUN_RUN_DIR": str(tmp_path / "file" / "runs")}
    job = ran(tmp_path, *PYTHON, "job.py", env=nowhere)
    assert job.out == "None False\n"


def test_a_run_that_was_asked_to_end_is_not_replaced(tmp_path):
    with run(tmp_path, *PYTHON, ASKED) as job:
        assert job.process.stdout.readline() == b"ready\n"
        os.kill(job.process.pid, 15)
        assert job.end() == 77
        (ended,) = job.events("ended")
        assert ended["reason"] == "it was asked to end"
        job.nothing_lives()
