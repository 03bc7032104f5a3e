"""Fixtures of the tests of plans."""

import pytest
from torchrun_lines import PET_ENVIRONMENTS, RealParser


@pytest.fixture(scope="session")
def reals() -> dict[str, RealParser]:
    return {name: RealParser(environ) for name, environ in PET_ENVIRONMENTS.items()}


@pytest.fixture(scope="session")
def real(reals: dict[str, RealParser]) -> RealParser:
    return reals["none"]
