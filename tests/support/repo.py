"""Where things lie in a checkout."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
SITE = SRC / "saferun" / "inject" / "site"
RECORDS = ROOT / "tests" / "records"
PROGRAMS = ROOT / "tests" / "programs"


def source(name: str) -> str:
    """Return the text of a program that a test runs: tests/programs/NAME.py."""
    return (PROGRAMS / f"{name}.py").read_text(encoding="utf-8")


def committed() -> list[str]:
    """Return the names of the files that git knows; skip where it knows none of this checkout."""
    if not shutil.which("git"):
        pytest.skip("no git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:  # an archive, or another user's ("dubious ownership")
        pytest.skip("not a git checkout of one's own")
    return [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]


def read_yaml(text: str) -> Any:
    """Return what a text of ours says; libyaml, where it is there, reads it ten times as fast."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def tool(name: str) -> ModuleType:
    """Return a module of tools/, which find each other as scripts beside each other do."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "tools"))


def installed_torch() -> tuple[Path, str]:
    """Return the folder and the release of the torch that is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec.origin is not None
    return Path(spec.origin).parent, importlib.metadata.version("torch").partition("+")[0]
