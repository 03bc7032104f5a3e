"""saferun.run, saferun.plan and saferun.diagnose, as a Python program calls them."""

import json
import os
import pathlib
import pickle
import subprocess
import sys

import pytest
from cases import check_cases
from command import call
from sandbox import text_of, write
from user_machine import (
    HUB_DOWN,
    KEY_ERROR,
    MITIGABLE,
    NO_SHM,
    NOW,
    OK,
    WRONG,
    UserMachine,
    finished,
)

import saferun
from saferun.planning.view import as_json


@pytest.fixture
def machine(home: pathlib.Path, tmp_path: pathlib.Path) -> UserMachine:
    return UserMachine(home, tmp_path)


def run(machine: UserMachine, *acts: dict, **options) -> saferun.RunResult:
    env = {**machine.environ, "ACTS": json.dumps(acts)}
    return saferun.run(["train.py"], env=env, cwd=machine.cwd, **options)


# --- what a run returns --------------------------------------------------------------------------


def test_a_run_that_a_mitigation_helps_is_told_attempt_by_attempt(machine):
    result = run(machine, MITIGABLE, OK, profile="cpu")
    assert (result.status, result.outcome) == (0, "ok")
    first, second = result.attempts
    assert (first.number, first.status, first.action, first.mitigations) == (1, 1, "again", ())
    assert first.diagnosis.kind == saferun.diagnose(NO_SHM).kind
    assert first.diagnosis.verdict == "mitigate"
    assert first.diagnosis.advice
    assert first.lived_s > 0
    assert (second.status, second.diagnosis) == (0, None)
    assert second.mitigations == result.mitigations == first.diagnosis.mitigations[:1]
    assert result.diagnosis is None
    assert result.journal == str(machine.runs / result.run_id)
    assert machine.listed()[0]["id"] == result.run_id


def test_the_diagnosis_of_a_run_is_that_of_its_last_failure(machine):
    result = run(machine, WRONG)
    assert (result.status, result.outcome, len(result.attempts)) == (1, "failed", 1)
    found = result.diagnosis
    assert (found.kind, found.root_line, found.root_rank) == (
        "user-exception",
        "[rank1]: KeyError: 'label'",
        1,
    )
    assert pickle.loads(pickle.dumps(result)) == result


def test_the_place_of_a_users_exception_is_in_the_diagnosis_and_on_stderr(machine):
    script = machine.cwd / "train.py"
    write(script, "batch = {}\nbatch['labels']\n")
    lines = []
    result = run(machine, settings={"launcher": "python"}, retries=1, on_line=lines.append)
    place = f"{script}:2  batch['labels']"
    assert result.diagnosis.user_frame == place
    assert f"saferun:     at {place}" in lines


def test_the_diagnosis_of_a_crash_has_the_python_stack(machine):
    write(machine.cwd / "train.py", "import os\ndef step():\n    os.abort()\nstep()\n")
    machine.environ["PYTHONFAULTHANDLER"] = "1"
    found = run(machine, settings={"launcher": "python"}, retries=1).diagnosis
    assert found.kind == "abort-unknown"
    assert [frame.partition(", ")[2] for frame in found.stack] == [
        "line 3 in step",
        "line 4 in <module>",
    ]


def test_check_raises_with_what_failed_and_what_to_do(machine):
    with pytest.raises(
        saferun.RunError,
        match=r"status 1: user-exception; .*KeyError: 'label'; Read the line shown or its",
    ) as raised:
        run(machine, WRONG, check=True)
    again = pickle.loads(pickle.dumps(raised.value))
    assert again.result == raised.value.result
    assert str(again) == str(raised.value)


def test_a_run_without_a_journal_has_its_status(machine):
    machine.program("torchrun", "#!/bin/sh\nkill -KILL $$\n")
    assert run(machine, retries=0) == saferun.RunResult(137, "", "failed", (), None)


def test_the_run_is_found_among_others(machine):
    """Among those of processes that had the same pid before, and one that began meanwhile."""
    for pid in range(os.getpid(), os.getpid() + 2000):
        (machine.runs / f"20000101-101010-{pid}").mkdir(parents=True)
        write(machine.runs / f"20000101-101010-{pid}" / "plan.json", "{}")
    before = set(os.listdir(machine.runs))

    def meanwhile(_line: str) -> None:
        if not (machine.runs / "19990101-101010-1").exists():
            finished(machine.runs, "19990101-101010-1", NOW)

    result = run(machine, OK, on_line=meanwhile)
    assert set(os.listdir(machine.runs)) - before == {"19990101-101010-1", result.run_id}


def test_the_job_reads_nothing(machine):
    machine.program("torchrun", "#!/bin/sh\ncat\n")
    lines: list[str] = []
    ours, kept = os.pipe(), os.dup(0)
    os.write(ours[1], b"of the caller\n")
    os.dup2(ours[0], 0)
    try:
        for descriptor in ours:
            os.close(descriptor)
        run(machine, retries=0, on_line=lines.append)
    finally:
        os.dup2(kept, 0)
    assert "of the caller" not in lines


# --- its output ----------------------------------------------------------------------------------


def test_output_goes_where_that_of_this_process_goes_and_nothing_is_printed(machine, capfd):
    run(machine, WRONG)
    saferun.plan(["train.py"], env=machine.environ, cwd=machine.cwd)
    saferun.diagnose(KEY_ERROR)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(
        "saferun: profile cpu (detected: no GPU)\n" + KEY_ERROR + "saferun: the run"
    )


def test_a_function_gets_each_line_or_files_take_them(machine, tmp_path, capfd):
    lines: list[str] = []
    run(machine, WRONG, on_line=lines.append)
    assert lines[:3] == ["saferun: profile cpu (detected: no GPU)", *KEY_ERROR.splitlines()]
    with open(tmp_path / "log", "w", encoding="utf-8") as file:
        run(machine, WRONG, stdout=file, stderr=subprocess.STDOUT)
    assert KEY_ERROR in text_of(tmp_path / "log")
    assert capfd.readouterr() == ("", "")


# --- what is refused -----------------------------------------------------------------------------


def test_a_mistake_is_raised_with_the_commands_text_and_nothing_starts(machine):
    def refused(kind: type[Exception], text: str, argv: list[str], options: dict) -> None:
        with pytest.raises(kind) as raised:
            saferun.run(argv, env=machine.environ, cwd=machine.cwd, **options)
        assert text in str(raised.value)

    usage, profile = saferun.UsageError, saferun.ProfileError
    check_cases(
        [
            (usage, f"in {machine.cwd}; did you mean `train.py`?", ["trian.py"], {}),
            (usage, "unrecognized arguments: --bogus", ["--bogus", "train.py"], {}),
            (usage, "training_script", [], {}),
            (usage, "--retries takes a whole number", ["train.py"], {"retries": -1}),
            (usage, "on_line", ["train.py"], {"stdout": subprocess.PIPE}),
            (usage, "on_line", ["train.py"], {"stderr": 2, "on_line": print}),
            (profile, "did you mean `h100`", ["train.py"], {"profile": "h10"}),
            (profile, "`retry.attempts`", ["train.py"], {"settings": {"retry.attemts": 1}}),
            (profile, "whole number", ["train.py"], {"settings": {"retry.attempts": "x"}}),
            (TypeError, "unexpected keyword argument 'profil'", ["train.py"], {"profil": "cpu"}),
            (TypeError, "a list of words", "train.py", {}),
        ],
        refused,
    )
    assert not machine.runs.exists()


# --- plan and diagnose ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "h100", "retries": 2}, ["--profile=h100", "--retries=2"]),
        ({"settings": {"retry.attempts": 5}}, ["--set", "retry.attempts=5"]),
        ({"settings": {"env.A": "a 'b' $c"}}, ["--set", "env.A=a 'b' $c"]),
        ({"settings": {"hooks.required": True}}, ["--set", "hooks.required=true"]),
        (
            {"settings": {"retry.resume_args": ["--a", "b,]"]}},
            ["--set=retry.resume_args=[--a, 'b,]']"],
        ),
        ({"settings": {"retry.deadline_s": None}}, ["--set", "retry.deadline_s=null"]),
        ({"settings": {"hooks.compile.enabled": "off"}}, ["--set=hooks.compile.enabled=off"]),
    ],
    ids=lambda value: str(next(iter(value), "")) if isinstance(value, dict) else "",
)
def test_a_plan_is_that_of_the_command(machine, options, words):
    shown = call(
        "plan", "--json", *words, "train.py", "x y", environ=machine.environ, cwd=machine.cwd
    )
    plan = saferun.plan(["train.py", "x y"], env=machine.environ, cwd=machine.cwd, **options)
    document = json.loads(shown.stdout)
    assert as_json(plan) == {key: document[key] for key in as_json(plan)}


def test_a_text_and_a_file_are_diagnosed_as_by_the_command(machine):
    log = machine.cwd / "train.log"
    write(log, HUB_DOWN)
    shown = call("diagnose", "--json", str(log), environ=machine.environ, cwd=machine.cwd)
    for found in (saferun.diagnose(HUB_DOWN), saferun.diagnose(log)):
        assert found.kind == json.loads(shown.stdout)["kind"] == "hub-unavailable"
    assert saferun.diagnose(HUB_DOWN, exit_code=0).kind == "no-failure"
    with pytest.raises(saferun.UsageError, match=r"for the file, Path\("):
        saferun.diagnose(str(log))
    with pytest.raises(FileNotFoundError, match=r"none\.log") as raised:
        saferun.diagnose(machine.cwd / "none.log")
    assert isinstance(raised.value, saferun.SaferunError)
    with pytest.raises(TypeError, match="not bytes"):
        saferun.diagnose(b"x")


# --- the package ---------------------------------------------------------------------------------


def test_no_file_of_the_working_directory_is_imported(machine):
    for name in ("ctypes", "click", "saferun"):
        write(machine.cwd / f"{name}.py", "raise SystemExit('imported')")
    assert run(machine, OK).status == 0


USER = """
import saferun
result: saferun.RunResult = saferun.run(["t.py"], profile="cpu", settings={"retry.attempts": 1})
kinds: list[str] = [one.diagnosis.kind for one in result.attempts if one.diagnosis]
command: tuple[str, ...] = saferun.plan(["t.py"]).command
saferun.run(["t.py"], profil="cpu")
saferun.diagnose("x").kinds
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_types(tmp_path):
    write(tmp_path / "user.py", USER)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(pathlib.Path(saferun.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.stdout.count(": error:") == 2, done.stdout
    assert 'Unexpected keyword argument "profil"' in done.stdout
    assert 'has no attribute "kinds"' in done.stdout
