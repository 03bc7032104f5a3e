"""Fixtures of the tests that write journals."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import disks
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
    with disks.small_disk(tmp_path / "small", "64k") as place:
        yield place
