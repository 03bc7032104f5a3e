"""Which torchrun the user has, found by looking at files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch_files import TORCHRUN, path_of, program, torch_in

from saferun.errors import UnavailableError
from saferun.planning.torchrun.torchrun_install import Launcher, find_launcher, worker_interpreter

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def no_torch_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])


def test_the_first_executable_torchrun_on_path_counts(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "torchrun").write_text("not executable")
    (tmp_path / "b" / "torchrun").mkdir(parents=True)
    program(tmp_path / "c" / "torchrun", "#!/opt/env/bin/python3.12\n" + TORCHRUN)
    program(tmp_path / "d" / "torchrun", "#!/usr/bin/python3\n" + TORCHRUN)
    launcher = find_launcher(path_of(*(tmp_path / name for name in ("none", "a", "b", "c", "d"))))
    assert launcher.argv == (str(tmp_path / "c" / "torchrun"),)
    assert launcher.interpreter == "/opt/env/bin/python3.12"


PIP = "'''exec' {} \"$0\" \"$@\"\n' '''\n" + TORCHRUN
FIRST_LINES = {
    "plain": ("#!/v/bin/python\n" + TORCHRUN, "/v/bin/python", ""),
    "with a version": ("#!/v/bin/python3.11\n" + TORCHRUN, "/v/bin/python3.11", ""),
    "free-threaded": ("#!/v/bin/python3.13t\n" + TORCHRUN, "/v/bin/python3.13t", ""),
    "with flags": ("#! /usr/bin/python3 -sP\n" + TORCHRUN, "/usr/bin/python3", "sP"),
    "env": ("#!/usr/bin/env python3\n" + TORCHRUN, "{bin}/python3", ""),
    "env -S": ("#!/usr/bin/env -S A=1 python3 -s -E\n" + TORCHRUN, "{bin}/python3", "sE"),
    "env of a missing Python": ("#!/usr/bin/env python2\n" + TORCHRUN, None, ""),
    "pip, blanks": ("#!/bin/sh\n" + PIP.format('"/my env/bin/python"'), "/my env/bin/python", ""),
    "pip, a long path": ("#!/bin/sh\n" + PIP.format("/l/bin/python3.12"), "/l/bin/python3.12", ""),
    "conda, flags": ("#!/bin/sh\n" + PIP.format("/c/bin/python -s"), "/c/bin/python", "s"),
    "uv, quoted": ("#!/bin/sh\n" + PIP.format("'/my env/bin/python3'"), "/my env/bin/python3", ""),
    "uv, can be moved": (
        "#!/bin/sh\n" + PIP.format('"$(dirname -- "$(realpath -- "$0")")"/\'python3\''),
        "{bin}/python3",
        "",
    ),
    "pyenv's shim": ("#!/usr/bin/env bash\nset -e\nexec pyenv exec torchrun\n", None, ""),
    "a shell wrapper": ('#!/bin/sh\nexec /opt/torchrun "$@"\n', None, ""),
    "a binary": ("\x7fELF\x02\x01\n", None, ""),
    "empty": ("", None, ""),
}


@pytest.mark.parametrize(
    ("text", "interpreter", "flags"), list(FIRST_LINES.values()), ids=list(FIRST_LINES)
)
def test_the_first_lines_name_the_interpreter(text, interpreter, flags, tmp_path):
    program(tmp_path / "torchrun", text)
    program(tmp_path / "python3", "a Python")
    launcher = find_launcher(path_of(tmp_path))
    assert launcher.argv == (str(tmp_path / "torchrun"),)
    assert launcher.interpreter == (interpreter and interpreter.format(bin=tmp_path))
    assert launcher.flags == flags


def test_pips_two_lines_really_start_the_interpreter_that_we_read(tmp_path):
    home = tmp_path / "my env"
    program(home / "python3", '#!/bin/sh\necho "started $0"\n')
    script = program(tmp_path / "bin" / "torchrun", "#!/bin/sh\n" + PIP.format(f'"{home}/python3"'))
    started = subprocess.run([script], capture_output=True, text=True, check=True).stdout
    assert started == f"started {find_launcher(path_of(script.parent)).interpreter}\n"


WRAPPERS = {
    "shell": '#!/bin/sh\nexec saferun "$@"\n',
    "shell, full path": '#!/bin/bash\n# as torchrun\n/opt/bin/saferun run "$@"\n',
    "module": '#!/bin/sh\nexec python3 -m saferun "$@"\n',
    "entry point": "#!/usr/bin/python3\nimport sys\nfrom saferun.__main__ import main\nmain()\n",
}


@pytest.mark.parametrize("text", list(WRAPPERS.values()), ids=list(WRAPPERS))
def test_a_torchrun_that_starts_saferun_is_passed_over(text, tmp_path):
    program(tmp_path / "ours" / "torchrun", text)
    program(tmp_path / "real" / "torchrun", "#!/v/bin/python\n" + TORCHRUN)
    launcher = find_launcher(path_of(tmp_path / "ours", tmp_path / "real"))
    assert launcher.argv == (str(tmp_path / "real" / "torchrun"),)


NOT_WRAPPERS = {
    "environment of that name": "#!/home/u/saferun/bin/python\n" + TORCHRUN,
    "pip's form of it": "#!/bin/sh\n" + PIP.format('"/my saferun env/bin/python"'),
    "a comment": '#!/bin/sh\n# not saferun yet\nexec /opt/torchrun "$@"\n',
    "a path in it": '#!/bin/sh\nexec /opt/saferun/torchrun --x saferun.log "$@"\n',
}


@pytest.mark.parametrize("text", list(NOT_WRAPPERS.values()), ids=list(NOT_WRAPPERS))
def test_a_torchrun_that_only_mentions_saferun_counts(text, tmp_path):
    program(tmp_path / "torchrun", text)
    assert find_launcher(path_of(tmp_path)).argv == (str(tmp_path / "torchrun"),)


@pytest.mark.parametrize("depth", [1, 2], ids=["a symlink", "a symlink to a symlink"])
def test_a_symlink_to_our_own_program_is_passed_over(depth, tmp_path, monkeypatch):
    ours = program(tmp_path / "tool" / "saferun", "#!/v/bin/python\nimport anything\n")
    link = ours
    for number in range(depth):
        following = tmp_path / f"link{number}" / "torchrun"
        following.parent.mkdir()
        following.symlink_to(link)
        link = following
    program(tmp_path / "real" / "torchrun", "#!/v/bin/python\n" + TORCHRUN)
    environ = path_of(link.parent, tmp_path / "real")
    assert find_launcher(environ).argv == (str(link),)  # before we know it for ours
    monkeypatch.setattr(sys, "argv", [str(link)])
    assert find_launcher(environ).argv == (str(tmp_path / "real" / "torchrun"),)


def test_without_one_our_own_torch_is_the_launcher(tmp_path, monkeypatch):
    torch_in(tmp_path / "site", "2.9.0")
    monkeypatch.setattr(sys, "path", ["/nonexistent.zip", str(tmp_path / "site")])
    launcher = find_launcher(path_of(tmp_path))
    assert launcher.argv[:1] == (sys.executable,)
    assert launcher.interpreter == sys.executable


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
    (package / "run.py").write_text("import runpy, antigravity_of_ours\n")
    (site / "antigravity_of_ours.py").write_text("print('site')\n")
    here = tmp_path / "here"
    here.mkdir()
    (here / "antigravity_of_ours.py").write_text("print('working directory')\n")
    monkeypatch.setattr(sys, "path", ["", str(site)])
    monkeypatch.setattr(sys, "version_info", version)
    launcher = find_launcher(path_of(tmp_path))
    environ = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(launcher.argv, cwd=here, env=environ, capture_output=True, text=True)
    assert done.stdout == "site\n", done.stderr


def test_a_torch_in_the_working_directory_is_not_ours(tmp_path, monkeypatch):
    torch_in(tmp_path, "2.9.0")
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nonexistent"])
    with pytest.raises(UnavailableError):
        find_launcher(path_of(tmp_path))


@pytest.mark.usefixtures("no_torch_of_ours")
def test_with_neither_the_error_says_what_where_and_the_fix(tmp_path):
    with pytest.raises(UnavailableError, match="there is no torchrun") as error:
        find_launcher(path_of(tmp_path))
    assert error.value.code == 69
    assert "PATH" in error.value.where
    assert "activate" in error.value.fix


@pytest.mark.usefixtures("no_torch_of_ours")
@pytest.mark.parametrize("path", [None, "", "::"], ids=["no PATH", "empty", "only colons"])
def test_an_odd_path_is_no_crash(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "defpath", "/nonexistent")
    with pytest.raises(UnavailableError):
        find_launcher({} if path is None else {"PATH": path})


def test_python_exec_is_the_workers_interpreter(tmp_path):
    python = program(tmp_path / "python9", "")
    launcher = Launcher(("/v/bin/torchrun",), "/v/bin/python")
    assert worker_interpreter(launcher, {}) == "/v/bin/python"
    assert worker_interpreter(launcher, {"PYTHON_EXEC": "/o/python"}) == "/o/python"
    environ = {"PYTHON_EXEC": "python9", **path_of(tmp_path)}
    assert worker_interpreter(launcher, environ) == str(python)
    assert worker_interpreter(launcher, {"PYTHON_EXEC": "python8", "PATH": ""}) is None
