"""The options of a torchrun, asked of its own Python once and kept."""

import os
import stat
import sys
from pathlib import Path

import pytest
from helpers import is_alive, until
from repo import source
from sandbox import write

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
        self.cache = root / "saferun"
        package = root / "site" / "torch" / "distributed"
        package.mkdir(parents=True)
        (package.parent / "__init__.py").write_text("", encoding="utf-8")
        (package / "__init__.py").write_text("", encoding="utf-8")
        write(package / "argparse_util.py", source("planning/fake_argparse_util"))
        write(package / "run.py", source("planning/fake_torch_run"))
        self.environ = {"PYTHONPATH": str(root / "site"), "XDG_CACHE_HOME": str(root)}
        self.environ |= {"STARTS": str(self.starts), "MORE": "", "PATH": os.defpath}

    def table(self, version: str | None = "9.9", **environ: str):
        launcher = Launcher(("/v/bin/torchrun",), sys.executable)
        return option_table(launcher, version, {**self.environ, **environ})

    @property
    def started(self) -> int:
        return (
            self.starts.read_text(encoding="utf-8").count("started") if self.starts.exists() else 0
        )

    @property
    def kept(self) -> list[Path]:
        return list(self.cache.glob("*"))


@pytest.fixture
def fake_torch(tmp_path: Path) -> FakeTorch:
    return FakeTorch(tmp_path)


def test_a_torchs_table_is_asked_once_for_each_version_and_kept_private(fake_torch):
    exported = {"PET_FLAG": "not a number", "SAFERUN_INJECT": "{}"}
    assert fake_torch.table(**exported) == FAKE_TABLE
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.started == 1
    assert [stat.S_IMODE(p.stat().st_mode) for p in (fake_torch.cache, *fake_torch.kept)] == [
        0o700,
        0o600,
    ]
    fake_torch.table("9.10")
    fake_torch.table(None)
    fake_torch.table(None)
    assert (fake_torch.started, len(fake_torch.kept)) == (4, 2)


BROKEN = {
    "it exits": "raise SystemExit(0)",
    "it is killed": "os.kill(os.getpid(), 9)",
    "an option with several values": "parser.add_argument('--many', nargs='+')",
}


@pytest.mark.parametrize("more", list(BROKEN.values()), ids=list(BROKEN))
def test_a_torch_that_does_not_answer_gives_no_table_and_leaves_none(more, fake_torch):
    assert fake_torch.table(MORE=more) is None
    assert fake_torch.kept == []


def test_a_hanging_torch_is_ended_with_all_that_it_started(fake_torch, tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun_probe, "OPTION_TABLE_TIMEOUT_S", 3.0)
    pids = tmp_path / "pids"
    more = (
        "import signal, subprocess; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(pids)!r}, 'w').write('%d %d' % (os.getpid(), child.pid)); signal.pause()"
    )
    assert fake_torch.table(MORE=more) is None
    # On a machine so loaded that it was ended before it could write, nothing was started.
    started = pids.read_text(encoding="utf-8").split() if pids.exists() else []
    until(lambda: not any(map(is_alive, started)), f"{started} still live", 300)


@pytest.mark.parametrize("interpreter", [None, "/nonexistent/python"], ids=["a shim", "gone"])
def test_without_an_interpreter_there_is_no_table(interpreter, tmp_path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert option_table(Launcher(("torchrun",), interpreter), "1", environ) is None


@pytest.mark.parametrize("text", ["{", "[]", "[1]", '[["a", ["x"], true, null]]', "\x00"])
def test_a_spoilt_cache_is_asked_anew_and_fixed(text, fake_torch):
    fake_torch.table()
    (kept,) = fake_torch.kept
    good = kept.read_text(encoding="utf-8")
    kept.write_text(text, encoding="utf-8")
    assert fake_torch.table() == FAKE_TABLE
    assert (fake_torch.started, kept.read_text(encoding="utf-8")) == (2, good)


def test_a_planted_link_is_neither_believed_nor_followed(fake_torch, tmp_path):
    fake_torch.table()
    (kept,) = fake_torch.kept
    lie = tmp_path / "lie"
    lie.write_text('[["lie", ["--lie"], true, null]]', encoding="utf-8")
    kept.unlink()
    kept.symlink_to(lie)
    assert fake_torch.table() == FAKE_TABLE
    assert (fake_torch.started, kept.is_symlink()) == (2, False)
    assert lie.read_text(encoding="utf-8") == '[["lie", ["--lie"], true, null]]'


def test_a_folder_that_is_not_ours_alone_is_not_used(fake_torch):
    fake_torch.cache.mkdir()
    fake_torch.cache.chmod(0o777)
    assert fake_torch.table() == FAKE_TABLE
    assert fake_torch.kept == []


def test_the_real_torch_answers_with_the_table_that_we_carry(tmp_path):
    torch = pytest.importorskip("torch")
    known = of_torch(torch.__version__)
    if known is None:
        pytest.skip("this torch is none of the releases in our table")
    launcher = Launcher(("torchrun",), sys.executable)
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert option_table(launcher, torch.__version__, environ) == known
