"""A command line under `launcher: python`: what python gets, and what is refused in one line."""

from pathlib import Path

import pytest
from sandbox import write

from saferun.errors import ProfileError, UsageError
from saferun.planning import inputs
from saferun.planning.request import read

PYTHON = ["--profile", "cpu", "--set", "launcher=python"]
CASES = {
    "a script": (["t.py", "a", "--set", "x"], ["t.py", "a", "--set", "x"]),
    "a script after --": (["--", "t.py", "a"], ["t.py", "a"]),
    "the script's own --": (["t.py", "--", "a"], ["t.py", "--", "a"]),
    "two of them": (["t.py", "--", "--"], ["t.py", "--", "--"]),
    "a module": (["-m", "pkg.mod", "-c", "x"], ["-m", "pkg.mod", "-c", "x"]),
    "code": (["-c", "print(1)", "-c", "--set", "x"], ["-c", "print(1)", "-c", "--set", "x"]),
    "code in the same word": (["-cprint(1)", "--set", "x"], ["-c", "print(1)", "--set", "x"]),
    "code after an option of ours": (["--retries", "1", "-c", "0"], ["-c", "0"]),
    "a script whose argument is -c": (["t.py", "-c", "print(1)"], ["t.py", "-c", "print(1)"]),
    "an option's value that looks like code": (["--set=env.A=-c", "t.py"], ["t.py"]),
    "a script on stdin": (["-", "a"], ["-", "a"]),
    "no python at all": (["--no-python", "echo", "a"], ["echo", "a"]),
}


def planned(argv: list[str], home: Path, **environ: str):
    environ = {"HOME": str(home), "PATH": "/nowhere", **environ}
    return inputs.gather(read([*PYTHON, *argv], environ), environ, str(home)).plan()


@pytest.mark.parametrize(("argv", "expected"), CASES.values(), ids=CASES)
def test_python_gets_the_script_as_it_stands(tmp_path, argv, expected):
    command = list(planned(argv, tmp_path).command)
    assert command == (expected if "--no-python" in argv else ["python", *expected])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no script is given"),
        (["-m"], "no script is given"),
        (["-c"], "-c needs code"),
        (["-u", "t.py"], "there is no option -u"),
        (["--nproc-per-node=2", "t.py"], "--nproc-per-node is torchrun's"),
        (["--help"], "--help is torchrun's"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_python_does_not_take_is_refused_in_one_line(tmp_path, argv, message):
    with pytest.raises(UsageError, match=message) as caught:
        planned(argv, tmp_path)
    assert caught.value.code == 2


def test_a_script_on_stdin_is_tried_once(tmp_path):
    plan = planned(["-"], tmp_path)
    assert plan.settings.retry.attempts == 1
    assert plan.notes["retry.attempts"].origin == "script on stdin"


def test_torchrun_still_gets_the_unknown_option_and_refuses_it():
    asked = read(["--profile", "cpu", "-c", "print(1)"], {"PATH": "/nowhere"})
    assert asked.line.args == ("-c", "print(1)")
    assert asked.line.refusal == "unrecognized arguments: -c"


def test_the_launcher_takes_no_condition(tmp_path):
    profile = tmp_path / "p.yaml"
    write(profile, "schema: 1\nlauncher: {value: python, when: {gpus: '>=1'}}\n")
    environ = {"HOME": str(tmp_path), "PATH": "/nowhere"}
    with pytest.raises(ProfileError, match="decides how the command line is read"):
        inputs.gather(read(["--profile", str(profile), "t.py"], environ), environ, str(tmp_path))
