"""What the tests of doctor share."""

from fake_smi import libcuda  # noqa: F401 - a fixture
