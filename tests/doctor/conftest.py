"""What the tests of doctor share."""

import pathlib

import pytest
from fake_nvml import Nvml
from fakecuda import SOURCE, compiled


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a CUDA driver library whose GPUs are host memory (tests/lab/fakes)."""
    return compiled(tmp_path_factory.mktemp("libcuda"), SOURCE.with_name("peers.c"))


@pytest.fixture
def nvml(tmp_path: pathlib.Path) -> Nvml:
    return Nvml(tmp_path / "nvml")
