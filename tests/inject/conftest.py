"""Fixtures of the tests that run real interpreters."""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from interpreters import Interpreters
from ranks import ForkServers, RunRanks


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """One server for each worker of the tests: its start takes seconds, its jobs do not."""
    forks = ForkServers(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.close()


@pytest.fixture
def run_ranks(forks: ForkServers, tmp_path: Path) -> RunRanks:
    """Runs a script as forked ranks; see `ForkServers.run`."""
    return functools.partial(forks.run, tmp_path)


@pytest.fixture
def interpreters(tmp_path: Path) -> Interpreters:
    return Interpreters(tmp_path)


@pytest.fixture
def torchrun() -> tuple[str, ...]:
    """Words that start the installed torchrun."""
    return (str(Path(sys.executable).with_name("torchrun")),)
