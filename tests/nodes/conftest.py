"""Hosts for the tests of several nodes."""

from collections.abc import Iterator
from pathlib import Path

import hosts
import pytest


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[hosts.Host]]:
    with hosts.standing(tmp_path, 2) as found:
        yield found


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[hosts.Host]]:
    with hosts.standing(tmp_path, 3) as found:
        yield found
