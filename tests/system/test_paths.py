"""Where our own files go, whose they are and who may enter: HOME may be another user's."""

import os
import resource
import shutil
import stat
import sys
from collections.abc import Iterator

import pytest
from rights import OTHER, STRANGER, needs
from sandbox import SAFERUN, captured
from users import acting_as, open_place

from saferun.system import paths


@pytest.fixture
def place() -> Iterator[str]:
    with open_place() as path:
        os.mkdir(f"{path}/tmp")
        os.chmod(f"{path}/tmp", 0o1777)
        os.mkdir(f"{path}/home", 0o755)
        os.chown(f"{path}/home", OTHER, OTHER)
        yield path


def of(place, **more):
    return {"HOME": f"{place}/home", "TMPDIR": f"{place}/tmp", **more}


def everything(place):
    """Whose each file is, and its mode."""
    found = {}
    for folder, directories, files in os.walk(place):
        for name in (*directories, *files):
            status = os.lstat(os.path.join(folder, name))
            path = os.path.relpath(os.path.join(folder, name), place)
            found[path] = (status.st_uid, stat.S_IMODE(status.st_mode))
    return found


def saferun(place, *argv, **more):
    environ = {**of(place), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    return captured(*SAFERUN, *argv, cwd=place, env={**environ, **more})


@pytest.mark.slow
@needs("become others")
@pytest.mark.parametrize("argv", [("doctor",), ("--retries=1", "--no-python", "true")])
def test_root_leaves_nothing_in_a_users_home(place, argv):
    done = saferun(place, *argv, SAFERUN_SET="launcher=torchrun")
    reported = [line for line in done.stderr.splitlines() if f"belongs to user {OTHER}" in line]
    assert len(reported) == 1, done.stderr
    assert f"{place}/tmp/saferun-0" in reported[0]
    left = everything(place)
    assert [path for path in left if path.startswith("home/")] == []
    ours = {path: left[path] for path in left if path.startswith("tmp/saferun-0")}
    assert ours
    assert all(owner == 0 and not mode & 0o077 for owner, mode in ours.values()), ours


@needs("become others")
def test_what_a_user_makes_is_his_and_its_parents_are_open_to_those_that_they_were_for(place):
    with acting_as(OTHER):
        assert paths.foreign_home(of(place)) == ""
        for folder in (paths.cache_dir(of(place)), paths.state_dir(of(place))):
            assert paths.write_private(f"{folder}/x/y", b"z")
    modes = {path: mode for path, (_, mode) in everything(f"{place}/home").items()}
    assert modes == {
        ".cache": 0o755,
        ".cache/saferun": 0o700,
        ".cache/saferun/x": 0o700,
        ".cache/saferun/x/y": 0o600,
        ".local": 0o755,
        ".local/state": 0o755,
        ".local/state/saferun": 0o700,
        ".local/state/saferun/x": 0o700,
        ".local/state/saferun/x/y": 0o600,
    }
    assert {owner for owner, _ in everything(f"{place}/home").values()} == {OTHER}


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_the_umask_only_narrows_what_is_made(tmp_path, umask):
    before = os.umask(umask)
    try:
        made = paths.private_dir(str(tmp_path / "a" / "saferun" / "b"))
    finally:
        os.umask(before)
    assert made is (umask != 0o777 or os.access(tmp_path / "a" / "saferun", os.W_OK))  # as root
    for path, (_, mode) in everything(tmp_path).items():
        assert mode & ~(0o755 if path == "a" else 0o700) == 0, path
    shutil.rmtree(tmp_path, ignore_errors=True)


@needs("become others")
@pytest.mark.parametrize(
    ("owner", "kept"), [(0, True), (OTHER, True), (STRANGER, False)], ids=["root", "ours", "not"]
)
def test_a_directory_that_xdg_names_is_used_where_it_is_ours_or_the_systems(place, owner, kept):
    os.mkdir(f"{place}/scratch")
    os.chown(f"{place}/scratch", owner, owner)
    environ = of(place, XDG_CACHE_HOME=f"{place}/scratch/me/cache")
    with acting_as(OTHER):
        inside = paths.cache_dir(environ).startswith(f"{place}/scratch")
        reported = paths.foreign_home(environ)
    assert (inside, reported == "") == (kept, kept)


@needs("become others")
@pytest.mark.parametrize("link", [False, True], ids=["there", "a link"])
def test_a_users_directory_in_a_home_of_ours_gets_nothing(place, link):
    """HOME=/tmp, or caches that an administrator has linked to a user's."""
    os.chown(f"{place}/home", 0, 0)
    theirs = f"{place}/{'theirs' if link else 'home'}/.cache"
    os.makedirs(theirs)
    os.chown(theirs, OTHER, OTHER)
    if link:
        os.symlink(theirs, f"{place}/home/.cache")
    assert paths.cache_dir(of(place)) == f"{place}/tmp/saferun-0/saferun"
    assert f"belongs to user {OTHER}" in paths.foreign_home(of(place))
    assert paths.cache_dir(of(place, TMPDIR=theirs)) == "/tmp/saferun-0/saferun"
    gone = of(place, HOME=f"{place}/nobody")
    assert paths.write_private(f"{paths.cache_dir(gone)}/x", b"y")
    assert not os.path.exists(f"{place}/nobody")
    assert "does not exist" in paths.foreign_home(gone)
    assert paths.state_dir(of(place)).startswith(f"{place}/home/")


@needs("become others")
@pytest.mark.parametrize("deep", ["", "/saferun", "/saferun/profiles", "a link"])
def test_what_a_stranger_puts_in_our_directorys_place_is_not_used(place, deep):
    with acting_as(STRANGER):
        if deep == "a link":
            os.symlink(f"{place}/home", f"{place}/tmp/saferun-0")
        else:
            os.makedirs(f"{place}/tmp/saferun-0{deep}", 0o777)
    assert not paths.write_private(f"{paths.cache_dir(of(place))}/profiles/x", b"y")
    with pytest.raises(PermissionError, match="not a private directory of ours"):
        paths.make(paths.runs_dir(None, of(place), place))
    assert all(owner == STRANGER for owner, _ in everything(f"{place}/tmp").values())
    assert everything(f"{place}/home") == {}


def test_a_disk_that_takes_a_part_only_keeps_the_old_file(tmp_path):
    """A limit on the size of files stands in: both write what fits, and report no error then."""
    path = str(tmp_path / "x")
    assert paths.write_private(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        assert not paths.write_private(path, b"n" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("x", b"old")]
