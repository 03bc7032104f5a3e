"""Which torchrun the user has, found by looking at files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sandbox import executable, python_program, shell, unwrapped
from torch_files import TORCHRUN, path_of, torch_in

from saferun.errors import UnavailableError
from saferun.planning.torchrun.torchrun_install import Launcher, find_launcher, worker_interpreter


def test_the_first_executable_torchrun_on_path_counts(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "torchrun").write_text("not executable", encoding="utf-8")
    (tmp_path / "b" / "torchrun").mkdir(parents=True)
    executable(tmp_path / "c" / "torchrun", "#!/opt/env/bin/python3.12\n" + TORCHRUN)
    executable(tmp_path / "d" / "torchrun", "#!/usr/bin/python3\n" + TORCHRUN)
    launcher = find_launcher(path_of(*(tmp_path / name for name in ("none", "a", "b", "c", "d"))))
    assert launcher.argv == (str(tmp_path / "c" / "torchrun"),)
    assert launcher.interpreter == "/opt/env/bin/python3.12"


PIP = "'''exec' {} \"$0\" \"$@\"\n' '''\n" + TORCHRUN
FIRST_LINES = {
    "plain": ("#!/v/bin/python\n" + TORCHRUN, "/v/bin/python", ""),
    "free-threaded": ("#!/v/bin/python3.13t\n" + TORCHRUN, "/v/bin/python3.13t", ""),
    "with flags": ("#! /usr/bin/python3 -sP\n" + TORCHRUN, "/usr/bin/python3", "sP"),
    "env": ("#!/usr/bin/env python3\n" + TORCHRUN, "{bin}/python3", ""),
    "env -S": ("#!/usr/bin/env -S A=1 python3 -s -E\n" + TORCHRUN, "{bin}/python3", "sE"),
    "env of a missing Python": ("#!/usr/bin/env python2\n" + TORCHRUN, None, ""),
    "pip, blanks": ("#!/bin/sh\n" + PIP.format('"/my env/bin/python"'), "/my env/bin/python", ""),
    "conda, flags": ("#!/bin/sh\n" + PIP.format("/c/bin/python -s"), "/c/bin/python", "s"),
    "uv, quoted": ("#!/bin/sh\n" + PIP.format("'/my env/bin/python3'"), "/my env/bin/python3", ""),
    "uv, can be moved": (
        "#!/bin/sh\n" + PIP.format('"$(dirname -- "$(realpath -- "$0")")"/\'python3\''),
        "{bin}/python3",
        "",
    ),
    "pyenv's shim": ("#!/usr/bin/env bash\nset -e\nexec pyenv exec torchrun\n", None, ""),
    "a binary": ("\x7fELF\x02\x01\n", None, ""),
}


@pytest.mark.parametrize(
    ("text", "interpreter", "flags"), list(FIRST_LINES.values()), ids=list(FIRST_LINES)
)
def test_the_first_lines_name_the_interpreter(text, interpreter, flags, tmp_path):
    executable(tmp_path / "torchrun", text)
    executable(tmp_path / "python3", "a Python")
    launcher = find_launcher(path_of(tmp_path))
    assert launcher.argv == (str(tmp_path / "torchrun"),)
    assert launcher.interpreter == (interpreter and interpreter.format(bin=tmp_path))
    assert launcher.flags == flags


WRAPPERS = {  # whether it starts saferun, and does not only name it
    '#!/bin/sh\nexec saferun "$@"\n': True,
    '#!/bin/bash\n# as torchrun\n/opt/bin/saferun run "$@"\n': True,
    '#!/bin/sh\nexec python3 -m saferun "$@"\n': True,
    "#!/usr/bin/python3\nfrom saferun.__main__ import main\nmain()\n": True,
    "#!/home/u/saferun/bin/python\n" + TORCHRUN: False,
    "#!/bin/sh\n" + PIP.format('"/my saferun env/bin/python"'): False,
    '#!/bin/sh\n# not saferun yet\nexec /opt/saferun/torchrun --x saferun.log "$@"\n': False,
}


@pytest.mark.parametrize(("text", "is_ours"), WRAPPERS.items())
def test_a_torchrun_that_starts_saferun_is_passed_over(text, is_ours, tmp_path):
    executable(tmp_path / "first" / "torchrun", text)
    executable(tmp_path / "second" / "torchrun", "#!/v/bin/python\n" + TORCHRUN)
    launcher = find_launcher(path_of(tmp_path / "first", tmp_path / "second"))
    assert launcher.argv == (str(tmp_path / ("second" if is_ours else "first") / "torchrun"),)


@pytest.mark.parametrize("depth", [1, 2], ids=["a symlink", "a symlink to a symlink"])
def test_a_symlink_to_our_own_program_is_passed_over(depth, tmp_path, monkeypatch):
    ours = executable(tmp_path / "tool" / "saferun", "#!/v/bin/python\nimport anything\n")
    link = ours
    for number in range(depth):
        following = tmp_path / f"link{number}" / "torchrun"
        following.parent.mkdir()
        following.symlink_to(link)
        link = following
    executable(tmp_path / "real" / "torchrun", "#!/v/bin/python\n" + TORCHRUN)
    environ = path_of(link.parent, tmp_path / "real")
    assert find_launcher(environ).argv == (str(link),)  # before we know it for ours
    monkeypatch.setattr(sys, "argv", [str(link)])
    assert find_launcher(environ).argv == (str(tmp_path / "real" / "torchrun"),)


HAS_DASH_P = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no -P")


@pytest.mark.parametrize(
    "version", [(3, 10), pytest.param((3, 11), marks=HAS_DASH_P)], ids=["3.10", "3.11"]
)
def test_our_own_torch_is_started_without_the_working_directory(version, tmp_path, monkeypatch):
    site = tmp_path / "site"
    torch_in(site, "2.9.0")
    package = site / "torch" / "distributed"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "run.py").write_text("import runpy, antigravity_of_ours\n", encoding="utf-8")
    (site / "antigravity_of_ours.py").write_text("print('site')\n", encoding="utf-8")
    here = tmp_path / "here"
    here.mkdir()
    (here / "antigravity_of_ours.py").write_text("print('working directory')\n", encoding="utf-8")
    monkeypatch.setattr(sys, "path", ["", str(site)])
    monkeypatch.setattr(sys, "version_info", version)
    launcher = find_launcher(path_of(tmp_path))
    assert launcher.interpreter == sys.executable
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(launcher.argv, cwd=here, env=environ, capture_output=True, text=True)
    assert done.stdout == "site\n", done.stderr


@pytest.mark.parametrize("environ", [{}, {"PATH": "::"}, {"PATH": "/nowhere"}], ids=str)
def test_with_neither_the_error_says_what_where_and_the_fix(tmp_path, monkeypatch, environ):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "defpath", "/nonexistent")
    torch_in(tmp_path, "2.9.0")  # of the working directory, which is not ours
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nonexistent"])
    with pytest.raises(UnavailableError, match="there is no torchrun") as error:
        find_launcher(environ)
    assert error.value.code == 69
    assert "PATH" in error.value.where
    assert "activate" in error.value.fix


def test_python_exec_is_the_workers_interpreter(tmp_path):
    python = executable(tmp_path / "python9", "")
    launcher = Launcher(("/v/bin/torchrun",), "/v/bin/python")
    assert worker_interpreter(launcher, {}) == "/v/bin/python"
    assert worker_interpreter(launcher, {"PYTHON_EXEC": "/o/python"}) == "/o/python"
    environ = {"PYTHON_EXEC": "python9", **path_of(tmp_path)}
    assert worker_interpreter(launcher, environ) == str(python)
    assert worker_interpreter(launcher, {"PYTHON_EXEC": "python8", "PATH": ""}) is None


BIN = Path(sys.executable).parent  # of the environment that has saferun, torch and torchrun
OTHER = "#!/opt/other/bin/python3\n" + TORCHRUN
HAS_TORCHRUN = pytest.mark.skipif(
    not (BIN / "torchrun").exists() or not (BIN / "saferun").exists(), reason="no console scripts"
)


@HAS_TORCHRUN
@pytest.mark.parametrize("start", [["saferun"], ["python", "-m", "saferun"]], ids=["path", "-m"])
@pytest.mark.parametrize(
    ("text", "path", "runs_own", "said"),
    [
        (OTHER, "{other}", True, "saferun was started by its path"),
        ("#!/bin/sh\nexec a-shim\n", "{other}", True, "saferun was started by its path"),
        (OTHER, "{other}:{bin}", False, "it is the first on PATH"),
        (OTHER, "{other}:{link}", False, "it is the first on PATH"),
        ("#!/bin/sh\nexec a-shim\n", "{other}:{bin}", False, ""),
        (OTHER, "{bin}:{other}", True, ""),
        (python_program(TORCHRUN), "{other}", False, ""),
        (None, "{other}", True, ""),
    ],
    ids=["other", "shim", "before", "link", "shim before", "behind", "same", "none"],
)
def test_which_of_two_environments_is_meant(start, text, path, runs_own, said, tmp_path):
    other, link = tmp_path / "other" / "torchrun", tmp_path / "links" / "saferun"
    if text:
        executable(other, text)
    link.parent.mkdir()
    link.symlink_to(BIN / "saferun")
    named = {"other": other.parent, "bin": BIN, "link": link.parent}
    done = subprocess.run(
        [BIN / start[0], *start[1:], "plan", "train.py"],
        env={**os.environ, "PATH": path.format(**named) + ":/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    shown = done.stdout + done.stderr
    assert shell(BIN / "torchrun" if runs_own else other, "train.py") in unwrapped(shown)
    assert ("starts the job: " in shown) == bool(said)
    assert said in shown
