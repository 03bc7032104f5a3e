"""torchrun's temporary directories go with an attempt; what is not saferun's stays."""

import os
from pathlib import Path

import pytest
from runs import ran

from saferun.journal import torchelastic_dirs
from saferun.journal.receipts import Receipt

OWN = '{"message": {"message": "E: x", "extraInfo": {"timestamp": "1", "time_s": 1.5}}}'
OF_TORCH = '{"message": {"message": "E: x", "extraInfo": {"timestamp": "1"}}}'
ENDED = 1 << 30  # no process has such a pid


def directory(folder: Path, name: str = "torchelastic_0a_bcdef") -> Path:
    """Make what torchrun makes for two ranks; return the directory of rank 0."""
    top = folder / name
    top.mkdir(mode=0o700)
    for rank in (0, 1):
        (top / "none_abcdefgh" / "attempt_0" / str(rank)).mkdir(parents=True)
    return top / "none_abcdefgh" / "attempt_0" / "0"


def remove(rank: Path, pid: int = ENDED, hook: str = "bootstrap") -> None:
    facts = {"error_file": str(rank / "error.json")}
    torchelastic_dirs.remove([Receipt(pid, 0, 0, 1.0, hook, "applied", facts)])


def test_what_saferun_left_there_is_removed(tmp_path):
    for error in (None, OWN):
        rank = directory(tmp_path)
        if error:
            (rank / "error.json").write_text(error, encoding="utf-8")
        remove(rank)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"), [("error.json", OF_TORCH), ("stdout.log", "1\n"), ("error.json.1", OWN)]
)
def test_what_others_left_there_stays(tmp_path, name, content):
    rank = directory(tmp_path)
    (rank / name).write_text(content, encoding="utf-8")
    (rank.parent / "1" / "error.json").write_text(OWN, encoding="utf-8")
    remove(rank)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [rank / name]
    assert (rank / name).read_text(encoding="utf-8") == content


def test_a_directory_that_torchrun_did_not_make_or_that_is_in_use_stays(tmp_path):
    for name in ("logs", "torchelastic_abcdefghi", "torchelastic_Abcdefgh"):
        rank = directory(tmp_path, name)
        remove(rank)
        assert rank.is_dir()
    rank = directory(tmp_path)
    remove(rank, os.getpid())  # it lives
    assert rank.is_dir()
    (tmp_path / "torchelastic_0a_bcdef").chmod(0o755)  # others can enter it
    remove(rank)
    assert rank.is_dir()


def test_no_link_is_followed(tmp_path):
    aside = tmp_path / "aside"
    aside.mkdir(mode=0o700)
    rank = directory(aside)
    os.symlink(aside / "torchelastic_0a_bcdef", tmp_path / "torchelastic_aaaaaaaa")
    remove(tmp_path / "torchelastic_aaaaaaaa" / rank.relative_to(aside / "torchelastic_0a_bcdef"))
    assert rank.is_dir()


def test_a_run_leaves_no_directory_of_torchruns_behind(tmp_path):
    (tmp_path / "job.py").write_text("raise ValueError('of the script')", encoding="utf-8")
    place = tmp_path / "temporary"
    place.mkdir()
    job = ran(tmp_path, "--nproc-per-node=2", "job.py", env={"TMPDIR": str(place)}, status=1)
    assert "ValueError: of the script" in job.events("ended")[0]["root_line"]
    assert list(place.iterdir()) == []


def test_logs_that_were_asked_for_stay(tmp_path):
    (tmp_path / "job.py").write_text("print('of the script')", encoding="utf-8")
    place = tmp_path / "temporary"
    place.mkdir()
    ran(tmp_path, "--redirects=3", "job.py", env={"TMPDIR": str(place)})
    (log,) = place.rglob("stdout.log")
    assert log.read_text(encoding="utf-8") == "of the script\n"
