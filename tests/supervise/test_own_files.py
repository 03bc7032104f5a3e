"""Where the ranks of a later attempt find the hooks when the installed ones are gone or changed."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from saferun.supervise.ready import own_files
from saferun.system.paths import PACKAGE

SITE = os.path.join(PACKAGE, "inject", "site")


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> own_files.OwnFiles:
    """Return our files, held; `hold` also makes them the last finder of modules."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    held = own_files.OwnFiles()
    assert held.hold()
    return held


def change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "_stamp", lambda status: (0, 0, 0))


def test_unchanged_hooks_are_used_where_they_are(files, tmp_path):
    assert files.hooks_site(SITE, str(tmp_path)) == SITE
    assert list(tmp_path.iterdir()) == []


def test_changed_hooks_are_written_as_they_were(files, tmp_path, monkeypatch):
    change(monkeypatch)
    site = Path(files.hooks_site(SITE, str(tmp_path)))
    assert site == tmp_path / "hooks" / "inject" / "site"
    for path in site.parent.rglob("*.py"):
        original = Path(PACKAGE, "inject", path.relative_to(site.parent))
        assert path.read_text() == original.read_text()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (site.parent / "hooks" / "init" / "hook.py").exists()
    assert stat.S_IMODE((tmp_path / "hooks").stat().st_mode) == 0o700


@pytest.mark.parametrize("run", ["missing", None])
def test_a_run_directory_that_is_gone_stays_so(files, tmp_path, monkeypatch, run):
    change(monkeypatch)
    assert files.hooks_site(SITE, run and str(tmp_path / run)) == SITE
    assert list(tmp_path.iterdir()) == []


def test_no_hooks_lie_where_others_can_put_their_own(files, tmp_path, monkeypatch):
    (tmp_path / "shared" / "run").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    change(monkeypatch)
    assert files.hooks_site(SITE, str(tmp_path / "shared" / "run")) == SITE
    assert list((tmp_path / "shared" / "run").iterdir()) == []
