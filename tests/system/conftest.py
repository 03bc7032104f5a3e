"""Fixtures of the tests of the edge to the operating system."""

from pathlib import Path

import pytest
from gpu_machine import FakeMachine


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)
