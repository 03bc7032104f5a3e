"""Fixtures of the tests that write journals."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from journals import MASKER

from saferun.journal.writer import Journal


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def base(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "state" / "runs"


@pytest.fixture
def begin(base: pathlib.Path, messages: list[str]) -> Iterator[Callable[..., Journal]]:
    """Begin a run in `base`, or elsewhere."""
    made = []

    def begin(where: pathlib.Path = base, run: str = "r", **clocks: Any) -> Journal:
        made.append(Journal.begin(str(where), run, MASKER, say=messages.append, **clocks))
        return made[-1]

    yield begin
    for journal in made:
        journal.close()


@pytest.fixture
def small_disk(tmp_path: pathlib.Path) -> Iterator[pathlib.Path]:
    """A file system of 64 KiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount")
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "small", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount (CAP_SYS_ADMIN)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
