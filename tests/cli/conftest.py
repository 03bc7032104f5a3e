"""Fixtures of the tests that call saferun's commands."""

from __future__ import annotations

import pathlib

import pytest
from desk import Desk


@pytest.fixture
def desk(home: pathlib.Path, tmp_path: pathlib.Path) -> Desk:
    return Desk(home, tmp_path)
