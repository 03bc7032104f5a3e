"""docs/start.md is what a newcomer does: its commands, in its order, do what it shows."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from repo import ROOT
from sandbox import captured, text_of

PAGE = ROOT / "docs" / "start.md"


def console_blocks() -> list[tuple[str, str]]:
    """Return (command, what the page shows of its output) in the order of the page."""
    text = "".join(re.findall(r"^```console\n(.*?)^```", text_of(PAGE), re.M | re.S))
    found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", text, re.M)
    return [(command.replace("\\\n", " "), shown) for command, shown in found]


def same(shown: str) -> str:
    """Return the part of a shown line that is the same in every run; `⋮` is what is left out."""
    return words(re.split(r"[\d(⋮]", shown)[0])


def words(text: str) -> str:
    """Return a text with single spaces: the width of a column follows what is in it."""
    return " ".join(text.split())


@pytest.mark.slow
def test_its_commands_do_what_it_shows(tmp_path):
    """Takes two trainings of the example on two ranks."""
    for name in ("examples", "tests/programs/faults"):
        shutil.copytree(ROOT / name, tmp_path / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {"PATH": path, "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    blocks = console_blocks()
    assert len(blocks) > 6
    for command, shown in blocks:
        done = captured("bash", "-c", command, cwd=tmp_path, env=environ)
        printed = done.stdout + done.stderr
        assert done.returncode == 0, (command, printed)
        missing = [line for line in shown.splitlines() if same(line) not in words(printed)]
        assert not missing, (command, printed)
