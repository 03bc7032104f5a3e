"""Whose files are used without being named: ./saferun.yaml and the user's own profiles."""

import os
import struct
import sys
from collections.abc import Iterator

import pytest
from rights import OTHER, STRANGER, needs
from sandbox import SAFERUN, captured
from users import acting_as, name_of, open_place

from saferun.errors import ProfileError
from saferun.model import Gpu, GpuFacts
from saferun.profile import files as profiles
from saferun.system import trust

HOSTILE = "schema: 1\nenv: {PYTHONPATH: /tmp/evil}\nrecover: {gpu_reset: when-idle}\n"
NONE = GpuFacts()


@pytest.fixture
def place() -> Iterator[str]:
    with open_place() as path:
        os.mkdir(f"{path}/home")
        yield path


def put(place, text=HOSTILE, *, uid=None, mode=0o644, name="saferun.yaml"):
    path = f"{place}/{name}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
    if uid is not None:
        os.chown(path, uid, uid)
    return path


def choose(place, wanted=None):
    return profiles.choose(wanted, "--profile", {"HOME": f"{place}/home"}, place, NONE)


def keys(chosen):
    return {key for doc in chosen.chain for key in doc.leaves}


def is_used(chosen):
    return "env.PYTHONPATH" in keys(chosen)


@needs("become others")
def test_a_strangers_file_runs_no_code_as_root(place):
    os.chmod(place, 0o1777)
    put(place, uid=STRANGER)
    ran = captured(
        *SAFERUN,
        "env",
        cwd=place,
        env={"PATH": os.environ["PATH"], "HOME": f"{place}/home", "PYTHONPATH": "/nowhere"},
    )
    assert ran.returncode == 0, ran.stderr
    assert "evil" not in ran.stdout
    assert f"./saferun.yaml is not used: it belongs to {name_of(STRANGER)}" in ran.stderr


@needs("become others")
@pytest.mark.parametrize(
    ("uid", "mode", "folder", "why"),
    [
        (STRANGER, 0o644, 0o755, "it belongs to"),
        (0, 0o666, 0o755, "others can write it (mode 0666)"),
        (0, 0o664, 0o755, "others can write it (mode 0664)"),
        (0, 0o644, 0o1777, "others can write its directory"),
        (0, 0o644, None, "its directory belongs to"),
    ],
    ids=["another's", "all-write", "group-writes", "sticky-directory", "a-stranger's-directory"],
)
def test_a_local_file_that_others_can_write_is_told_and_not_used(place, uid, mode, folder, why):
    path = put(place, uid=uid, mode=mode)
    os.chown(path, uid, OTHER)
    if folder is None:
        os.chown(place, STRANGER, STRANGER)
    else:
        os.chmod(place, folder)
    chosen = choose(place)
    assert not is_used(chosen)
    assert why in chosen.remarks[0]
    assert is_used(choose(place, "./saferun.yaml"))  # who names it trusts it


@needs("become others", "show the clone")
def test_a_user_trusts_what_is_root_s_and_what_is_his(place):
    put(place)
    with acting_as(OTHER):
        assert is_used(choose(place))
    os.chown(f"{place}/saferun.yaml", OTHER, OTHER)
    with acting_as(OTHER):
        assert is_used(choose(place))
    with acting_as(STRANGER):
        assert not is_used(choose(place))


@needs("become others")
def test_a_link_is_as_trusted_as_the_directory_of_its_target(place):
    os.mkdir(f"{place}/job")
    put(place, name="shared/profile.yaml")
    os.symlink("../shared/profile.yaml", f"{place}/job/saferun.yaml")
    chosen = profiles.choose(None, "", {"HOME": f"{place}/home"}, f"{place}/job", NONE)
    assert is_used(chosen)
    os.chmod(f"{place}/shared", 0o1777)
    chosen = profiles.choose(None, "", {"HOME": f"{place}/home"}, f"{place}/job", NONE)
    assert is_used(chosen)
    os.chown(f"{place}/shared", STRANGER, STRANGER)  # who can replace what is in it
    chosen = profiles.choose(None, "", {"HOME": f"{place}/home"}, f"{place}/job", NONE)
    assert not is_used(chosen)
    put(place, "schema: 1\nextends: [./base.yaml]\n")
    put(place, uid=STRANGER, name="base.yaml")
    with pytest.raises(ProfileError, match=r"base.yaml, which is not used: it belongs to"):
        choose(place)


@needs("become others")
def test_a_file_that_changes_hands_between_the_look_and_the_reading_is_refused(place, monkeypatch):
    path = put(place)
    monkeypatch.setattr(profiles.trust, "problem", lambda path: "")
    os.chown(path, STRANGER, STRANGER)
    with pytest.raises(ProfileError, match="it belongs to"):
        choose(place)


@needs("become others")
def test_a_users_profiles_are_not_roots_where_home_is_still_the_users(place):
    text = "schema: 1\nmatch: {gpu: [H100]}\nenv: {PYTHONPATH: /tmp/evil}\n"
    own = put(place, text, uid=OTHER, name="home/.config/saferun/profiles/mine.yaml")
    os.chown(os.path.dirname(own), OTHER, OTHER)
    gpu = GpuFacts((Gpu(0, "GPU-0", "NVIDIA H100 80GB HBM3"),), "proc")
    chosen = profiles.choose(None, "", {"HOME": f"{place}/home"}, place, gpu)
    assert chosen.chain[-1].name == "h100"
    with pytest.raises(ProfileError, match=r"mine.yaml is not used: it belongs to"):
        choose(place, "mine")
    with acting_as(OTHER):
        assert is_used(choose(place, "mine"))


def test_variables_that_load_code_are_named(place):
    put(place, "schema: 1\nenv: {LD_PRELOAD: x, PYTHONPATH: y, NCCL_DEBUG: INFO}\n")
    (remark,) = choose(place).remarks
    assert remark.startswith("./saferun.yaml sets LD_PRELOAD, PYTHONPATH, which can make")


def test_only_a_named_profile_resets_gpus(place):
    put(place, "schema: 1\nextends: [h100-llava]\nrecover: {gpu_reset: when-idle}\n")
    chosen = choose(place)
    assert "recover.gpu_reset" not in keys(chosen)
    assert "name the profile" in chosen.remarks[-1]
    assert "recover.gpu_reset" in keys(choose(place, "./saferun.yaml"))


def test_a_fifo_in_place_of_the_local_file_is_not_waited_for(place):
    os.mkfifo(f"{place}/saferun.yaml", 0o644)
    assert "not a regular file" in choose(place).remarks[0]
    with pytest.raises(ProfileError, match="not a regular file"):
        choose(place, "./saferun.yaml")


def grant(path, uid):
    """Let a user write to a file by an access control list (linux/posix_acl_xattr.h)."""
    entries = [(1, 6, -1), (2, 7, uid), (4, 6, -1), (16, 7, -1), (32, 4, -1)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *one) for one in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", content)
    except OSError:
        pytest.skip("needs a file system with access control lists")


@needs("become others")
@pytest.mark.parametrize("name", ["saferun.yaml", ""], ids=["file", "directory"])
def test_a_list_that_lets_a_stranger_write_shows_as_the_groups_bits(place, name):
    put(place, mode=0o664)  # of root's own group, which is trusted without a list
    assert is_used(choose(place))
    grant(f"{place}/{name}", STRANGER)
    chosen = choose(place)
    assert not is_used(chosen)
    assert "others can write it" in str(chosen.remarks)


@needs("make namespaces")
@pytest.mark.parametrize(("gid", "problem"), [(OTHER, ""), (0, "others can write it (mode 0664)")])
def test_a_group_that_is_another_users_own_is_not_private(place, gid, problem):
    """It does not list the users whose own group it is."""
    with (
        open("/etc/passwd", encoding="utf-8") as file,
        open(f"{place}/passwd", "w", encoding="utf-8") as copy,
    ):
        copy.write(f"{file.read()}colleague:x:{OTHER}:{gid}::/:/bin/sh\n")
    mount = 'mount --bind "$1/passwd" /etc/passwd && exec "$2" -c "$3"'
    ask = f"from saferun.system import trust; print(trust.problem({put(place, mode=0o664)!r}))"
    done = captured("unshare", "--mount", "sh", "-c", mount, "sh", place, sys.executable, ask)
    assert done.stdout == f"{problem}\n", done.stderr


@needs("become others")
@pytest.mark.parametrize(
    ("uid", "mode", "can"),
    [(0, 0o755, False), (0, 0o1777, False), (0, 0o777, True), (STRANGER, 0o1777, True)],
)
def test_who_can_write_above_a_directory_can_replace_it(place, uid, mode, can):
    os.makedirs(f"{place}/above/run")
    os.chown(f"{place}/above", uid, uid)
    os.chmod(f"{place}/above", mode)
    assert trust.can_be_replaced(f"{place}/above/run") == can
