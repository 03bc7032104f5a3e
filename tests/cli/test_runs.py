"""What runs leave behind is listed, whatever became of them.

The journals are those of real runs with a torchrun that fails as a test wants, and broken ones.
"""

import json
import os
import pathlib
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator

import pytest
import rights
import users
from cases import check_cases
from helpers import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sandbox import SAFERUN
from user_machine import (
    DOWN,
    MITIGABLE,
    NOW,
    OK,
    WRONG,
    event,
    finished,
    journal,
    names,
    whole_page,
)

from saferun.cli.runs import runs_view
from saferun.errors import UnavailableError
from saferun.journal import reader as runs
from saferun.system import procfs


def test_runs_are_listed_newest_first_with_how_they_ended(machine):
    began = time.time()
    first = machine.launch(OK)
    second = machine.launch(WRONG, command_line=("train.py", "--lr", "1"))
    third = machine.launch(MITIGABLE, OK)
    head, *rows = machine.ask("list").splitlines()
    assert head.split() == ["ID", "STARTED", "TOOK", "ATTEMPTS", "OUTCOME", "SCRIPT"]
    assert [row.split()[0] for row in rows] == [third.name, second.name, first.name]
    run = machine.listed()[1]
    assert (run["id"], run["path"]) == (second.name, str(second))
    assert (run["outcome"], run["kind"], run["status"]) == ("failed", "user-exception", 1)
    assert (run["script"], run["script_args"], run["attempts"]) == ("train.py", ["--lr", "1"], 1)
    assert began - 1 <= run["started_at"] <= time.time()
    assert run["took_s"] > 0
    tries_and_ends = [" ".join(row.split()[5:]) for row in rows]
    assert tries_and_ends == [
        "2 ok, with nccl-shm-off train.py",
        "1 failed: user-exception train.py",
        "1 ok train.py",
    ]


def test_the_list_is_of_the_directory_that_the_launch_was_given(machine):
    given = ("--run-dir", str(machine.folder / "elsewhere"))
    machine.ran(*SAFERUN, *given, "train.py", env={"ACTS": "[{}]"})
    assert machine.listed() == []
    assert "ok" in machine.ask("list", *given)
    assert "ok" in machine.ask("list", SAFERUN_RUN_DIR="../elsewhere")


def test_a_machine_without_runs_says_so_and_is_no_error(machine):
    done = machine.ran(*SAFERUN, "runs", "list")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"saferun: no runs in {machine.runs}\n"
    assert not machine.runs.exists()


def test_a_run_is_running_while_its_saferun_lives_and_interrupted_after_it(machine):
    act = {"wait": str(machine.folder / "gate")}
    with machine.running(act, waits_for='"started"') as job:
        (run,) = machine.listed()
        assert (run["outcome"], run["status"]) == ("running", None)
        assert run["took_s"] >= 0
        assert f"saferun's pid is {job.pid}" in machine.ask("show", "last")
        job.kill()
        job.wait()
        (run,) = machine.listed()
    assert (run["outcome"], run["took_s"]) == ("interrupted", None)
    assert "without a record" in machine.ask("show", "last")


def test_a_run_that_waits_for_its_next_attempt_is_running(machine):
    with machine.running(DOWN, OK, waits_for='"again"') as job:
        assert [run["outcome"] for run in machine.listed()] == ["running"]
        until(lambda: takes_sigterm(job.pid), "it waits and takes signals", 300)
        job.terminate()
        job.wait()
    (run,) = machine.listed()
    assert (run["outcome"], run["status"]) == ("interrupted", 128 + signal.SIGTERM)


def takes_sigterm(pid: int) -> bool:
    """Tell whether a process handles SIGTERM, or blocks it to read it from a descriptor."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    sets = [int(line.split()[1], 16) for line in status if line.startswith(("SigBlk", "SigCgt"))]
    return any(bits >> (signal.SIGTERM - 1) & 1 for bits in sets)


def test_a_run_that_was_asked_to_end_is_interrupted_and_has_not_failed(machine):
    with machine.running({"wait": str(machine.folder / "gate")}, waits_for='"started"') as job:
        until((machine.folder / "gate").exists, "the job runs", 300)
        job.terminate()
        assert job.wait() == 128 + signal.SIGTERM
    (run,) = machine.listed()
    assert (run["outcome"], run["kind"]) == ("interrupted", "")
    assert "asked to end by SIGTERM" in machine.ask("show", "last")


HERE = procfs.this_process()


PROVED = {
    "its process lives": ([event("attempt", attempt=1, by=HERE)], "running", ""),
    "its pid was given away": ([event("attempt", by={**HERE, "start": 1})], "interrupted", ""),
    "another container's": ([event("attempt", by={**HERE, "pids": "x"})], "unknown", ""),
    "no word of its process, but young": ([event("attempt")], "unknown", ""),
    "and quiet for days": ([event("attempt", NOW - 2 * runs.DAY_S)], "interrupted", ""),
    "no last word, but success": ([event("ended", status=0, action="done")], "ok", ""),
    "but a verdict": ([event("ended", status=1, action="stop", kind="x")], "failed", "x"),
    "and it was to go on": ([event("ended", status=1, action="again", kind="x")], "unknown", ""),
    "our fault": ([event("fault"), event("end", status=1)], "failed", "a fault of saferun's own"),
    "nothing but a status": ([event("end", status=3)], "failed", "status 3"),
    "a status that is garbage": ([event("end", status="x")], "failed", ""),
}


def test_the_outcome_is_what_the_journal_proves(tmp_path):
    def check(events, outcome, kind):
        run = runs.read(
            str(journal(tmp_path, str(len(os.listdir(tmp_path))), *events)), "", NOW + 1
        )
        assert (run.outcome, run.kind) == (outcome, kind)

    check_cases(PROVED, check)


BROKEN = {
    "empty": b"",
    "garbage": os.urandom(4096),
    "cut": json.dumps(event("attempt", attempt=1)).encode()[:-9],
    "a list": b"[1, 2]\n",
    "deep": b'{"at":' + b"[" * 100_000,
    "other types": json.dumps(
        event("attempt", attempt="x", mitigations=7, by=[], at="then", s=None, lost="y")
    ).encode()
    + b"\n"
    + json.dumps(event("ended", attempt=-1, status=[], lived_s="1", signals=1, kind={})).encode(),
    "numbers without end": b'{"at": 1e999, "s": NaN, "event": "attempt", "attempt": 1e30}\n'
    b'{"at": -1, "s": -Infinity, "event": "end", "status": 99999999999999999999999}\n',
    "hostile text": json.dumps(
        event("ended", attempt=1, status=1, action="stop", kind="\x1b[2J\n\ud800", reason="\x07")
    ).encode(),
}


def test_a_broken_journal_is_listed_and_shown_as_far_as_it_goes(machine):
    for number, content in enumerate(BROKEN.values()):
        place = finished(machine.runs, f"run-{number}", NOW)
        (place / "events.jsonl").write_bytes(content)
        (place / "plan.json").write_bytes(content)
        shown = machine.ask("show", place.name)
        assert all(c.isprintable() or c == "\n" for c in shown)
        machine.ask("show", place.name, "--json")
    assert len(machine.listed()) == len(machine.ask("list").splitlines()) - 1 == len(BROKEN)
    machine.ask("clean", "--keep", "0", "--older-than", "0")


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda part: (
        st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3)
    ),
    max_leaves=6,
)
_KEYS = "at s attempt mitigations by status reason action kind fingerprint signals killed lived_s"
_EVENTS = st.fixed_dictionaries(
    {"event": st.sampled_from(["attempt", "started", "ended", "end", "plan", "fault"])},
    optional=dict.fromkeys([*_KEYS.split(), "unkillable", "plan", "lost", "delay_s"], _JSON),
)
_PLANS = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("script", "script_args", "command", "env", "hooks"), _JSON)
)


@given(st.lists(_EVENTS, max_size=5), _PLANS)
@settings(suppress_health_check=list(HealthCheck), max_examples=80, deadline=None)
def test_no_journal_at_all_raises(events, plan):
    with tempfile.TemporaryDirectory() as base:
        place = journal(pathlib.Path(base), "r", *events, plan=plan)
        (place / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        whole_page(pathlib.Path(base))
        runs_view.table(runs.find(base, NOW)[0], NOW)


def test_what_is_no_run_is_not_listed(tmp_path):
    base, real = tmp_path / "runs", tmp_path / "real"
    finished(tmp_path, "real", NOW)
    (base / "empty").mkdir(parents=True)
    (base / "photos").mkdir()
    (base / "photos" / "one.jpg").touch()
    (base / "events.jsonl").touch()
    (base / "link").symlink_to(real)
    (base / "linked").mkdir()
    (base / "linked" / "plan.json").symlink_to(real / "plan.json")
    shutil.copytree(real, base / ".hidden")
    assert runs.find(str(base), NOW) == ([], 0)


@pytest.fixture
def strangers() -> Iterator[pathlib.Path]:
    """A directory of runs, one of which this process's user may not look into."""
    base = pathlib.Path(tempfile.mkdtemp())
    base.chmod(0o755)
    finished(base, "mine", NOW)
    finished(base, "theirs", NOW).chmod(0o000)
    if os.access(base / "theirs", os.R_OK):  # root, whom modes do not stop
        if why := rights.missing("become others"):
            pytest.skip(why)
        os.chown(base / "mine", rights.STRANGER, -1)
        with users.acting_as(rights.STRANGER):
            yield base
    else:
        yield base
    (base / "theirs").chmod(0o700)
    shutil.rmtree(base)


def test_other_peoples_runs_are_counted_and_stop_nobody(strangers):
    found, closed = runs.find(str(strangers), NOW)
    assert (names(found), closed) == (["mine"], 1)
    with pytest.raises(UnavailableError, match="may not be read") as refused:
        runs.named(str(strangers), "theirs", NOW)
    assert refused.value.where.endswith("theirs")


def test_a_place_that_cannot_be_listed_is_said_with_its_fix(machine):
    (machine.folder / "file").touch()
    messages = machine.ask("list", "--run-dir", str(machine.folder / "file"), status=69)
    assert messages.count("\n") == 1
    for part in ("Not a directory", str(machine.folder / "file"), "--run-dir"):
        assert part in messages
