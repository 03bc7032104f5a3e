"""Runs that take GPU locks, as fixtures."""

import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakecuda import MINOR, compiled
from gpu_runs import Machine
from lock_runs import Run
from recovery_host import RecoveryHost


@pytest.fixture
def shared() -> Iterator[pathlib.Path]:
    """A directory that every user can reach, as /run/lock is; pytest's own are private."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="saferun-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(shared: pathlib.Path, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start runs on one lock directory; all have ended when the test has."""
    runs = []

    def start(
        *uuids: str, mode: str = "refuse", directory: pathlib.Path | None = None, **options: Any
    ) -> Run:
        runs.append(Run(tmp_path, directory or shared / "lock", uuids, mode, **options))
        return runs[-1]

    shared.joinpath("lock").mkdir()
    shared.joinpath("lock").chmod(0o1777)
    yield start
    for run in runs:
        run.close()


@pytest.fixture
def holds(start: Callable[..., Run]) -> Callable[..., Run]:
    """Start a run that must get its locks."""

    def holds(*uuids: str, **options: Any) -> Run:
        run = start(*uuids, **options)
        run.first_words = run.answer()
        assert "held" in run.first_words, run.first_words
        return run

    return holds


@pytest.fixture
def outcome(start: Callable[..., Run]) -> Callable[..., Any]:
    """Start a run, let it end at once, and return what came of it."""

    def outcome(*uuids: str, **options: Any) -> Any:
        run = start(*uuids, **options)
        messages = run.answer()
        run.end()
        return messages

    return outcome


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / f"nvidia{MINOR}").touch()
    return tmp_path / "dev"


@pytest.fixture
def host(dev: Path) -> RecoveryHost:
    return RecoveryHost(dev)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def machine(tmp_path: Path, library: Path) -> Machine:
    return Machine(tmp_path, library)
