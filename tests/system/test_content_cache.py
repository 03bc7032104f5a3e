"""What was computed from a content is kept until the content changes."""

import os
import stat
from pathlib import Path

import pytest

from saferun.system import content_cache

MADE_OF = ["1.0", "a text\n", 7]
VALUE = {"a": [1, None, "\udcff"]}


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_an_entry_is_read_only_where_it_was_made_of_the_same(environ):
    assert content_cache.read("x/y", MADE_OF, environ) is None
    content_cache.write("x/y", MADE_OF, VALUE, environ)
    assert content_cache.read("x/y", MADE_OF, environ) == VALUE
    for other in ([*MADE_OF, 8], [], None, "a text\n"):
        assert content_cache.read("x/y", other, environ) is None
    content_cache.write("x/y", "other", 3, environ)
    assert content_cache.read("x/y", MADE_OF, environ) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff", b"[" * 100_000])
def test_an_entry_that_is_garbled_is_none(environ, tmp_path, content):
    content_cache.write("y", MADE_OF, VALUE, environ)
    (file,) = tmp_path.rglob("y.json")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.write_bytes(content)
    assert content_cache.read("y", MADE_OF, environ) is None


def test_an_entry_behind_a_link_is_not_read(environ, tmp_path):
    content_cache.write("y", MADE_OF, VALUE, environ)
    (file,) = tmp_path.rglob("y.json")
    os.rename(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert content_cache.read("y", MADE_OF, environ) is None


def test_a_place_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    environ = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    content_cache.write("y", MADE_OF, VALUE, environ)
    assert content_cache.read("y", MADE_OF, environ) is None
