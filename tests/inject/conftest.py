"""Fixtures of the tests that run real interpreters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from interpreters import Interpreters


@pytest.fixture
def interpreters(tmp_path: Path) -> Interpreters:
    return Interpreters(tmp_path)


@pytest.fixture
def torchrun() -> tuple[str, ...]:
    """Words that start the installed torchrun."""
    return (str(Path(sys.executable).with_name("torchrun")),)
