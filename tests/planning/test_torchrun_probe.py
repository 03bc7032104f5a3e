"""The options of a torchrun, asked of its own Python once and kept."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
from helpers import is_alive, until
from repo import source

from saferun.knowledge.torchrun_options import of_torch
from saferun.model import Option
from saferun.planning.torchrun import torchrun_probe
from saferun.planning.torchrun.torchrun_install import Launcher
from saferun.planning.torchrun.torchrun_probe import option_table

FAKE_TABLE = (
    Option("help", ("-h", "--help"), True, None),
    Option("new_thing", ("--new-thing", "--new_thing"), False, "PET_NEW_THING"),
    Option("flag", ("--flag",), True, "PET_FLAG"),
    Option("plain", ("--plain",), False, None),
)


class FakeTorch:
    """A torch with a parser of its own, reached by PYTHONPATH; counts its imports."""

    def __init__(self, root: Path) -> None:
        self.starts = root / "starts"
        self.cache = root / "cache"
        self.package = root / "site" / "torch" / "distributed"
        self.package.mkdir(parents=True)
        (self.package.parent / "__init__.py").write_text("")
        (self.package / "__init__.py").write_text("")
        (self.package / "argparse_util.py").write_text(source("planning/fake_argparse_util"))
        (self.package / "run.py").write_text(source("planning/fake_torch_run"))
        self.environ = {"PYTHONPATH": str(root / "site"), "PATH": os.defpath}
        self.environ |= {"STARTS": str(self.starts), "MORE": ""}

    def table(self, version: str | None = "9.9", **environ: str):
        launcher = Launcher(("/v/bin/torchrun",), sys.executable)
        return option_table(launcher, version, str(self.cache), {**self.environ, **environ})

    @property
    def started(self) -> int:
        return self.starts.read_text().count("started") if self.starts.exists() else 0

    @property
    def kept(self) -> Path:
        (path,) = self.cache.iterdir()
        return path


@pytest.fixture
def fake_torch(tmp_path: Path) -> FakeTorch:
    return FakeTorch(tmp_path)


def test_the_installed_torchs_table_is_asked_once_and_kept_private(fake_torch):
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.started == 1
    assert stat.S_IMODE(fake_torch.cache.stat().st_mode) == 0o700
    assert stat.S_IMODE(fake_torch.kept.stat().st_mode) == 0o600


def test_another_version_is_asked_anew_and_an_unknown_one_is_not_kept(fake_torch):
    fake_torch.table("9.9")
    fake_torch.table("9.10")
    assert fake_torch.started == 2
    fake_torch.table(None)
    fake_torch.table(None)
    assert fake_torch.started == 4
    assert len(list(fake_torch.cache.iterdir())) == 2


def test_what_the_user_exported_does_not_reach_the_asking(fake_torch):
    assert fake_torch.table(PET_FLAG="not a number", SAFERUN_INJECT="{}") == FAKE_TABLE


BROKEN = {
    "an import fails": "import nonexistent",
    "it exits": "raise SystemExit(0)",
    "it is killed": "os.kill(os.getpid(), 9)",
    "an option with several values": "parser.add_argument('--many', nargs='+')",
}


@pytest.mark.parametrize("more", list(BROKEN.values()), ids=list(BROKEN))
def test_a_torch_that_does_not_answer_gives_no_table_and_leaves_none(more, fake_torch):
    assert fake_torch.table(MORE=more) is None
    assert list(fake_torch.cache.iterdir()) == []


def test_a_hanging_torch_is_ended_with_all_that_it_started(fake_torch, tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun_probe, "OPTION_TABLE_TIMEOUT_S", 3.0)
    pids = tmp_path / "pids"
    more = (
        "import signal, subprocess; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(pids)!r}, 'w').write('%d %d' % (os.getpid(), child.pid)); signal.pause()"
    )
    assert fake_torch.table(MORE=more) is None
    # On a machine so loaded that it was ended before it could write, nothing was started.
    started = pids.read_text().split() if pids.exists() else []
    until(lambda: not any(map(is_alive, started)), f"{started} still live", 300)


@pytest.mark.parametrize("interpreter", [None, "/nonexistent/python"], ids=["a shim", "gone"])
def test_without_an_interpreter_there_is_no_table(interpreter, tmp_path):
    assert option_table(Launcher(("torchrun",), interpreter), "1", str(tmp_path), {}) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[1]", '[["a", "b", true, null]]', '[["a", ["x"], true, null]]', "\x00"]
)
def test_a_spoilt_cache_is_asked_anew_and_fixed(text, fake_torch):
    fake_torch.table()
    good = fake_torch.kept.read_text()
    fake_torch.kept.write_text(text)
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.started == 2
    assert fake_torch.kept.read_text() == good


def plant_symlink(path: Path, target: Path) -> None:
    path.symlink_to(target)


def plant_fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [plant_symlink, plant_fifo])
def test_a_planted_file_is_neither_believed_nor_followed(plant, fake_torch, tmp_path):
    fake_torch.table()
    kept = fake_torch.kept
    lie = tmp_path / "lie"
    lie.write_text('[["lie", ["--lie"], true, null]]')
    kept.unlink()
    plant(kept, lie)
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.started == 2
    assert lie.read_text() == '[["lie", ["--lie"], true, null]]'
    assert kept.is_file()
    assert not kept.is_symlink()


def test_a_planted_draft_is_not_written_through(fake_torch, tmp_path):
    fake_torch.table()
    kept = fake_torch.kept
    kept.unlink()
    target = tmp_path / "precious"
    target.write_text("precious")
    kept.with_name(f"{kept.name}.{os.getpid()}").symlink_to(target)
    assert fake_torch.table() == FAKE_TABLE
    assert target.read_text() == "precious"


def test_a_folder_that_others_can_write_is_not_used(fake_torch):
    fake_torch.cache.mkdir()
    fake_torch.cache.chmod(0o777)
    assert fake_torch.table() == FAKE_TABLE
    assert list(fake_torch.cache.iterdir()) == []


def test_an_unusable_cache_folder_is_no_matter(fake_torch):
    fake_torch.cache.write_text("a file")
    assert fake_torch.table() == FAKE_TABLE
    launcher = Launcher(("torchrun",), sys.executable)
    assert option_table(launcher, "9.9", None, fake_torch.environ) == FAKE_TABLE


def test_the_real_torch_answers_with_the_table_that_we_carry(tmp_path):
    torch = pytest.importorskip("torch")
    known = of_torch(torch.__version__)
    if known is None:
        pytest.skip("this torch is none of the releases in our table")
    launcher = Launcher(("torchrun",), sys.executable)
    assert option_table(launcher, torch.__version__, str(tmp_path)) == known
