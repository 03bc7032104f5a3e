"""Who holds a lock, as other users are told, and which records are not believed."""

import json
import os
import pathlib

import pytest
from lock_runs import A, B, files, flock, take
from rights import STRANGER, needs
from sandbox import text_of, write
from users import name_of

from saferun.gpu.lock import gpu_locks, lock_owner

# Users


@needs("become others")
@pytest.mark.parametrize(
    ("first", "second"),
    [(0, STRANGER), (STRANGER, 0), (STRANGER, 1)],
    ids=["root", "user", "users"],
)
def test_two_users_see_each_other_and_each_is_named(shared, holds, outcome, first, second):
    folder = shared / "everybodys" / "lock"
    folder.parent.mkdir()
    folder.parent.chmod(0o1777)
    there = holds(A, uid=first, directory=folder)
    user = name_of(first)
    assert f"pid {there.pid} of user {user} " in outcome(A, uid=second, directory=folder)["busy"]
    assert "held" in outcome(B, uid=second, directory=folder)
    there.end()
    assert outcome(A, uid=second, directory=folder)["messages"] == []


# What the kernel does under fs.protected_regular=2 (Ubuntu's default), also where it is 0.
PROTECTED = """
def rule(event, args):
    if event == "open" and args[2] & os.O_CREAT and not args[2] & os.O_EXCL:
        raise PermissionError(13, "fs.protected_regular", args[0])
sys.addaudithook(rule)
"""


@needs("become others")
def test_a_kernel_that_protects_other_users_files_in_sticky_directories_is_no_hindrance(
    holds, outcome
):
    holds(A, uid=STRANGER).end()
    assert outcome(A, first=PROTECTED)["messages"] == []


@needs("become others")
def test_a_lock_file_that_another_user_made_read_only_still_locks(shared, start, outcome, holds):
    file = shared / "lock" / f"{A}.lock"
    file.touch(0o644)
    holds(A, uid=STRANGER)
    assert "busy" in outcome(A, uid=1)


@needs("become others")
def test_another_user_can_neither_remove_nor_change_our_files(shared, holds, outcome):
    first = holds(A)
    vandal = """
for name in os.listdir(job["directory"]):
    for harm in (os.unlink, lambda p: os.rename(p, p + "x"), lambda p: os.chmod(p, 0)):
        try: harm(job["directory"] + "/" + name)
        except PermissionError: pass
        else: said.append(name)
"""
    answer = outcome(A, uid=STRANGER, first=vandal)
    assert answer["messages"] == []
    assert f"pid {first.pid} of user root" in answer["busy"]


def forged(pid, **changes):
    """A record as its writer would like it to be read."""
    record = lock_owner.this_process("forged.py", "run-0")._asdict()
    start = int(text_of(pathlib.Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[19])
    record |= {"pid": pid, "start": start, "slots": 4, "schema": 1}
    return {**record, "devices": [A], "files": [f"{A}.slot0", f"{A}.lock"], **changes}


@needs("become others")
@pytest.mark.parametrize("name_uid", [0, STRANGER], ids=["in-roots-name", "in-own-name"])
def test_a_record_that_names_another_users_process_is_ignored(
    shared, holds, outcome, start, name_uid
):
    take(shared / "lock", A).close()
    path = shared / "lock" / f"holder.{name_uid}.1.00000000.json"
    write(path, json.dumps(forged(1)))
    path.chmod(0o644)
    os.chown(path, STRANGER, STRANGER)
    with flock(shared / "lock" / f"{A}.lock"):
        assert "forged" not in outcome(A)["busy"]
    os.chown(path, 0, 0)  # and were it root's own, it would count
    path = path.rename(path.with_name("holder.0.1.00000000.json"))
    with flock(shared / "lock" / f"{A}.lock"):
        assert "pid 1 of user root (forged.py" in outcome(A)["busy"]


# Records that are none


def put_record(folder, number=0, **changes):
    path = folder / f"holder.{os.geteuid()}.{os.getpid()}.{number}.json"
    write(path, json.dumps({**forged(os.getpid()), "slots": 1, **changes}))
    path.chmod(0o644)
    return path


def busy_with(tmp_path) -> str:
    """What a run is told while somebody holds the lock of A."""
    with flock(tmp_path / f"{A}.lock"), pytest.raises(gpu_locks.BusyError) as busy:
        take(tmp_path, A)
    return str(busy.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"[]", b"[" * 16000, b'{"pid": 1}', b"1" * 16000, b"x" * 100_000],
    ids=["empty", "binary", "list", "deep", "keys", "digits", "long"],
)
def test_garbage_in_place_of_a_record_changes_nothing(tmp_path, content):
    put_record(tmp_path).write_bytes(content)
    with take(tmp_path, A) as held:
        assert f"{A}.slot0" in files(held)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, True),
        ({"pid": 0}, False),
        ({"pid": 1 << 80}, False),
        ({"pid": "1"}, False),
        ({"pid": True}, False),
        ({"start": 1}, False),
        ({"start": None}, False),
        ({"host": "elsewhere"}, False),
        ({"since": "today"}, False),
        ({"since": float("nan")}, False),
        ({"since": 1e300}, False),
        ({"slots": 0}, False),
        ({"slots": "1"}, False),
        ({"devices": None}, False),
        ({"files": 3}, False),
        ({"pid": 4_000_000_000, "start": 1, "pids": "pid:[1]"}, True),  # another namespace
    ],
    ids=str,
)
def test_a_record_is_named_unless_it_cannot_be_true(tmp_path, changes, named):
    put_record(tmp_path, **changes)
    take(tmp_path, B).close()
    busy = busy_with(tmp_path)
    assert ("forged.py" in busy) is named
    assert "now ended" not in busy


def test_a_planted_record_of_any_kind_is_passed_over(tmp_path):
    target = put_record(tmp_path).rename(tmp_path / "target")
    names = [tmp_path / f"holder.{os.geteuid()}.{os.getpid()}.{n}.json" for n in range(5)]
    names[0].symlink_to(target)
    names[1].hardlink_to(target)
    os.mkfifo(names[2])
    names[3].mkdir()
    names[4].write_bytes(target.read_bytes())
    names[4].chmod(0o666)  # anybody may have written it
    assert "forged.py" not in busy_with(tmp_path)


def test_a_record_whose_run_holds_no_slot_counts_against_nobody(tmp_path):
    put_record(tmp_path, files=[])
    with take(tmp_path, A, slots=3), take(tmp_path, A, slots=3) as second:
        assert f"{A}.slot1" in files(second)


def test_what_a_record_says_cannot_move_the_terminals_cursor(holds, outcome):
    holds(A, command="\x1b[2J\r\nsaferun: all is well\u202e" + "x" * 1000)
    busy = outcome(A)["busy"]
    assert busy.isprintable()
    assert len(busy) < 800
