"""Fixtures of the tests that run generated scripts."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine(tmp_path) as machine:
        yield machine
