"""What is odd about a directory, a script or a value is one clear line, or no matter at all."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.__main__ import main


@pytest.fixture
def deleted(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory that is gone."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setenv("PATH", "/usr/bin:relative")
    monkeypatch.setenv("PYTHONPATH", "relative")
    gone.rmdir()
    yield
    os.chdir(tmp_path)


@pytest.mark.parametrize(
    "argv", [["plan", "t.py"], ["env"], ["profiles", "list"], ["gen-shell", "--", "t.py"]]
)
def test_a_deleted_working_directory_stops_no_command(deleted, capsys, argv):
    assert main(argv) == 0
    assert capsys.readouterr().out


def test_a_script_that_is_nested_too_deep_is_planned_without_its_calls(
    home, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for source in ("x = a" + ".b()" * 900, "x = " + "-" * 5000 + "1", "x = " + "(" * 5000):
        (tmp_path / "t.py").write_text(source, encoding="utf-8")
        assert main(["plan", "t.py"]) == 0
        assert "Traceback" not in capsys.readouterr().err


def test_env_leaves_control_sequences_in_values(home, tmp_path):
    (tmp_path / "p.yaml").write_text('schema: 1\nenv: {X: "\\e[31ma\\e[0m"}\n', encoding="utf-8")
    argv = [sys.executable, "-m", "saferun", "env", "--profile", "./p.yaml"]
    code = 'eval "$("$@")" && printf %s "$X"'
    done = subprocess.run(
        ["bash", "-c", code, "bash", *argv], cwd=tmp_path, capture_output=True, check=False
    )
    assert done.stdout == b"\x1b[31ma\x1b[0m", done.stderr
