"""Files that follow no link: read, appended to, and written whole."""

import os
import stat
from pathlib import Path

import pytest
from rights import STRANGER, needs
from users import acting_as, open_place

from saferun.base import files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_part_of_a_regular_file_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20) + b"the end")
    assert len(files.read(str(path), 9 << 20)) == len(path.read_bytes())
    assert files.read(str(path), 3, (1 << 20) + 4) == b"end"
    assert files.read(str(path), 9, 9 << 20) == files.read(str(path), 0) == b""


def test_what_is_no_regular_file_has_no_content(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for name in ("fifo", "link", "none", ".", "zero\0byte"):
        assert files.read(f"{tmp_path}/{name}", 9) == b""
        assert files.read_private(f"{tmp_path}/{name}") is None
    assert files.read("/dev/zero", 9) == b""
    assert files.read(f"{tmp_path}/link", 9, follow=True) == b"mine"
    assert files.read_private(f"{tmp_path}/file", 2) == b"mi"


@needs("become others")
def test_another_users_file_is_not_private():
    with open_place() as place:
        path = f"{place}/file"
        files.replace(path, b"mine", 0o644)
        with acting_as(STRANGER):
            assert (files.read(path, 9), files.read_private(path)) == (b"mine", None)


@pytest.mark.parametrize("write", [files.replace, files.write_new])
def test_a_whole_file_is_written_over_a_planted_draft(tmp_path, write):
    """One that was planted, or left by a process that was killed and had our pid."""
    (tmp_path / f"file.{os.getpid()}.tmp").symlink_to(tmp_path / "target")
    (tmp_path / "target").write_text("mine", encoding="utf-8")
    write(str(tmp_path / "file"), b"new")
    assert sorted(os.listdir(tmp_path)) == ["file", "target"]
    assert ((tmp_path / "file").read_bytes(), mode(tmp_path / "file")) == (b"new", 0o600)
    assert (tmp_path / "target").read_text(encoding="utf-8") == "mine"


def test_only_a_new_file_is_created(tmp_path):
    path = tmp_path / "file"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(FileExistsError):
        files.write_new(str(path), b"new")
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_text(encoding="utf-8") == "old"


def test_a_file_system_without_hard_links_gets_a_new_file(tmp_path, monkeypatch):
    def refused(source: str, target: str) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refused)
    files.write_new(str(tmp_path / "file"), b"new")
    with pytest.raises(FileExistsError):
        files.write_new(str(tmp_path / "file"), b"newer")
    assert (os.listdir(tmp_path), (tmp_path / "file").read_bytes()) == (["file"], b"new")


def test_a_file_is_replaced_in_an_open_directory(tmp_path):
    directory = os.open(tmp_path, os.O_RDONLY)
    (tmp_path / "file").write_text("old", encoding="utf-8")
    files.replace("file", b"new", directory=directory)
    os.close(directory)
    assert ((tmp_path / "file").read_bytes(), os.listdir(tmp_path)) == (b"new", ["file"])


def test_appending_follows_no_link(tmp_path):
    path = str(tmp_path / "file")
    assert [files.append(path, b"one\n"), files.append(path, b"two\n")] == [4, 8]
    assert mode(tmp_path / "file") == 0o600
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(OSError, match="symbolic"):
        files.append(f"{tmp_path}/link", b"three\n")
    assert files.read(path, 99) == b"one\ntwo\n"
