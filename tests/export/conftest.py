"""Fixtures of the tests that run generated scripts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    for pid in machine.living():
        os.kill(pid, signal.SIGKILL)
