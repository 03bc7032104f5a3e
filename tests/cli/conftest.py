"""Fixtures of the tests that call saferun's commands."""

import pathlib

import pytest
from user_machine import UserMachine


@pytest.fixture
def machine(home: pathlib.Path, tmp_path: pathlib.Path) -> UserMachine:
    return UserMachine(home, tmp_path)
