"""The Python of TensorFlow's own environment, and runs of saferun whose job it runs."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from interpreters import Interpreters, Ran
from repo import ROOT
from runs import Run, run

PROGRAMS = ROOT / "tests" / "programs" / "tensorflow"
# Nothing of its own on stderr: what oneDNN says on some processors is logged before any level.
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
HOOK = {"cross_device_ops": "hierarchical-copy", "memory_growth": True}


@pytest.fixture(scope="session")
def tensorflow_python() -> Path:
    """TEST_TENSORFLOW names another environment, as for another version of TensorFlow."""
    place = Path(os.environ.get("TEST_TENSORFLOW", ROOT / ".venv-tensorflow")) / "bin" / "python"
    if not place.exists():
        pytest.skip(f"there is no {place} (make test-tensorflow)")
    return place


@pytest.fixture
def job(tmp_path: Path, tensorflow_python: Path) -> Callable[..., Ran]:
    """Runs a program of tests/programs/tensorflow with the hook."""
    interpreters = Interpreters(tmp_path)

    def start(
        program: str, *arguments: str, hook: dict[str, object] | None = HOOK, **environ: str
    ) -> Ran:
        return interpreters.run(
            argv=(str(PROGRAMS / program), *arguments),
            python=str(tensorflow_python),
            hooks=None if hook is None else {"tensorflow": hook},
            **{**QUIET, **environ},
        )

    return start


@pytest.fixture
def supervised(
    tmp_path: Path, tensorflow_python: Path
) -> Callable[..., AbstractContextManager[Run]]:
    """Runs train.py under saferun, in a shell's environment that finds TensorFlow's Python."""
    (tmp_path / "state").mkdir()

    @contextmanager
    def start(fault: str, *options: str) -> Iterator[Run]:
        settings = ("--profile=tf-rtx5090", "--set=retry.backoff_s=[0, 0]", *options)
        arguments = (str(PROGRAMS / "train.py"), fault, str(tmp_path / "state"))
        path = f"{tensorflow_python.parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        env = {"PATH": path, **QUIET}
        with run(tmp_path, *settings, *arguments, env=env) as started:
            yield started

    return start
