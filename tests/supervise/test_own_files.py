"""Where the ranks of a later attempt find the hooks when the installed ones are gone or changed."""

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


def test_changed_hooks_are_written_as_they_were(files, tmp_path, monkeypatch):
    assert files.hooks_site(SITE, str(tmp_path)) == SITE
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(own_files, "_stamp", lambda status: (0, 0, 0))
    site = Path(files.hooks_site(SITE, str(tmp_path)))
    assert site == tmp_path / "hooks" / "inject" / "site"
    for path in site.parent.rglob("*.py"):
        original = Path(PACKAGE, "inject", path.relative_to(site.parent))
        assert path.read_text(encoding="utf-8") == original.read_text(encoding="utf-8")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (site.parent / "hooks" / "init" / "hook.py").exists()
    assert stat.S_IMODE((tmp_path / "hooks").stat().st_mode) == 0o700


def test_no_hooks_are_written_where_there_is_no_run_or_others_can_put_their_own(
    files, tmp_path, monkeypatch
):
    (tmp_path / "shared" / "run").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    monkeypatch.setattr(own_files, "_stamp", lambda status: (0, 0, 0))
    for run in (None, tmp_path / "missing", tmp_path / "shared" / "run"):
        assert files.hooks_site(SITE, run and str(run)) == SITE
    assert list(tmp_path.rglob("*.py")) == []
