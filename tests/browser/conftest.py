"""A headless Chromium for all tests of this folder."""

from collections.abc import Iterator

import pytest
from browser import Browser, chromium, program


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = program()
    if path is None:
        pytest.skip("no Chromium (apt-get install chromium, or SAFERUN_TEST_CHROMIUM)")
    with chromium(path, tmp_path_factory.mktemp("browser")) as started:
        yield started
