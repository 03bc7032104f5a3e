"""Which releases the tests run with: what an older torch lacks is skipped by its name."""

from importlib.metadata import version

import pytest


def torch_before(release: str) -> bool:
    """Whether the installed torch is older than a release such as "2.8"."""
    return _numbers(version("torch")) < _numbers(release)


def needs_torch(release: str, what: str) -> pytest.MarkDecorator:
    """A mark that skips a test where torch is older; `what` is what the test needs of it."""
    return pytest.mark.skipif(torch_before(release), reason=f"needs torch {release}: {what}")


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:2])
