"""The pre-commit hooks and the GitHub action: their commands, run as these run them."""

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from repo import ROOT
from sandbox import text_of, write

ACTION = yaml.safe_load(text_of(ROOT / "action.yml"))
HOOKS = {hook["id"]: hook for hook in yaml.safe_load(text_of(ROOT / ".pre-commit-hooks.yaml"))}
SAFERUN = Path(sys.executable).parent / "saferun"
GOOD, BAD = "schema: 1\n", "schema: 1\nx: 1\n"
HOSTILE = ("$(touch x).yaml", "a b.yaml", "';touch x;'.yaml", "--help.yaml")


@pytest.fixture
def place(home: Path, tmp_path: Path) -> Path:
    """A repository of a user's, with a generated script and a stale one."""
    (tmp_path / "runner/saferun/bin").mkdir(parents=True)
    (tmp_path / "runner/saferun/bin/saferun").symlink_to(SAFERUN)
    (tmp_path / "profiles").mkdir()
    made = [SAFERUN, "gen-shell", "-o", "run.sh", "--", "t.py"]
    subprocess.run(made, cwd=tmp_path, check=True, env=environ(tmp_path))
    text = text_of(tmp_path / "run.sh")
    write(tmp_path / "stale.sh", text.replace("torchrun t.py", "torchrun other.py"))
    return tmp_path


def environ(place: Path, **more: str) -> dict[str, str]:
    packed = f"{place.parent}/cache of parsed files"  # of all tests
    own = {"HOME": f"{place}/home", "XDG_CACHE_HOME": packed}
    return {**own, "PATH": f"{SAFERUN.parent}:/usr/bin:/bin", **more}


def checks(place: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the action's last step as GitHub runs it, with the defaults of its inputs."""
    step = ACTION["runs"]["steps"][-1]
    values = {name: one["default"] for name, one in ACTION["inputs"].items()} | inputs
    given = {n: values[re.findall(r"inputs\.(\w+)", text)[0]] for n, text in step["env"].items()}
    write(place / "step.sh", step["run"])
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"],
        cwd=place,
        env=environ(place, RUNNER_TEMP=f"{place}/runner", **given),
        capture_output=True,
        text=True,
    )


def test_the_action_checks_what_its_defaults_name_and_needs_none_of_it(place):
    assert (checks(place).returncode, checks(place).stdout) == (0, "")
    write(place / "profiles/good.yaml", GOOD)
    write(place / "saferun.yaml", BAD)
    done = checks(place)
    assert done.returncode == 1
    assert done.stdout == "saferun.yaml: 1 error\nprofiles/good.yaml: no errors\n"


def test_the_action_finds_a_stale_script(place):
    assert checks(place, scripts="run.sh").returncode == 0
    done = checks(place, scripts="run.sh\nstale.sh\n")
    assert done.returncode == 1
    assert "run.sh: up to date\nstale.sh: stale" in done.stdout


def test_a_file_that_is_named_and_missing_fails(place):
    assert checks(place, profiles="nope.yaml").returncode == 1


def test_inputs_and_names_of_files_are_data(place):
    for name in HOSTILE:
        write(place / "profiles" / name, GOOD)
    done = checks(place, profiles="profiles/*.yaml\n$(touch x)\n; touch x")
    assert done.stdout.count(": no errors") == len(HOSTILE)
    assert not (place / "x").exists()
    assert not [s["run"] for s in ACTION["runs"]["steps"] if "${{" in s["run"]]


def hook(place: Path, name: str, *files: str) -> subprocess.CompletedProcess[str]:
    """Run a hook as pre-commit does: its entry's words, and the files behind them."""
    words: list[Any] = [*shlex.split(HOOKS[name]["entry"]), *files]
    return subprocess.run(words, cwd=place, env=environ(place), capture_output=True, text=True)


def test_the_hook_for_scripts_checks_each_of_them(place):
    assert hook(place, "saferun-gen-shell-check", "run.sh").returncode == 0
    done = hook(place, "saferun-gen-shell-check", "stale.sh", "run.sh")
    assert (done.returncode, done.stdout.count("\n")) == (1, 2)


def test_the_hook_for_profiles_checks_the_files_that_it_is_for(place):
    for name in ("saferun.yaml", "sub/saferun.yaml", "profiles/a.yaml", "profiles/a.yml"):
        assert re.search(HOOKS["saferun-profiles-check"]["files"], name)
    assert not re.search(HOOKS["saferun-profiles-check"]["files"], "config/a.yaml")
    write(place / "saferun.yaml", BAD)
    assert hook(place, "saferun-profiles-check", "saferun.yaml").returncode == 78
