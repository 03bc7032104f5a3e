"""Fixtures of the tests that run generated scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import kill_all
from scripts import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    kill_all(machine.mark)
