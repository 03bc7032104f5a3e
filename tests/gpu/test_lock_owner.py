"""Who holds a lock, as other users are told, and which records are not believed."""

from __future__ import annotations

import json
import os
import pathlib
import pwd

import pytest
from lock_runs import A, B, files, flock, take
from users import STRANGER, root

from saferun.gpu.lock import gpu_locks, lock_owner

# Users


@root
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
    user = pwd.getpwuid(first).pw_name
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


@root
def test_a_kernel_that_protects_other_users_files_in_sticky_directories_is_no_hindrance(
    holds, outcome
):
    holds(A, uid=STRANGER).end()
    assert outcome(A, first=PROTECTED)["messages"] == []


@root
def test_a_lock_file_that_another_user_made_read_only_still_locks(shared, start, outcome, holds):
    file = shared / "lock" / f"{A}.lock"
    file.touch(0o644)
    holds(A, uid=STRANGER)
    assert "busy" in outcome(A, uid=1)


@root
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
    start = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    record |= {"pid": pid, "start": start, "slots": 4, "schema": 1}
    return {**record, "devices": [A], "files": [f"{A}.slot0", f"{A}.lock"], **changes}


@root
@pytest.mark.parametrize("name_uid", [0, STRANGER], ids=["in-roots-name", "in-own-name"])
def test_a_record_that_names_another_users_process_is_ignored(
    shared, holds, outcome, start, name_uid
):
    take(shared / "lock", A).close()
    path = shared / "lock" / f"holder.{name_uid}.1.00000000.json"
    path.write_text(json.dumps(forged(1)))
    path.chmod(0o644)
    os.chown(path, STRANGER, STRANGER)
    with flock(shared / "lock" / f"{A}.lock"):
        assert "forged" not in outcome(A)["busy"]
    os.chown(path, 0, 0)  # and were it root's own, it would count
    path = path.rename(path.with_name("holder.0.1.00000000.json"))
    with flock(shared / "lock" / f"{A}.lock"):
        assert "pid 1 of user root (forged.py" in outcome(A)["busy"]


# Records that are none


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"null",
        b"7",
        b"[" * 16000,
        b'{"pid": 1}',
        b"1" * 16000,
        b"x" * 100_000,
    ],
    ids=["empty", "cut", "binary", "list", "null", "number", "deep", "keys", "digits", "long"],
)
def test_garbage_in_place_of_a_record_changes_nothing(tmp_path, content):
    (tmp_path / f"holder.{os.geteuid()}.{os.getpid()}.00000000.json").write_bytes(content)
    with take(tmp_path, A) as held:
        assert f"{A}.slot0" in files(held)


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 0},
        {"pid": -1},
        {"pid": 1 << 80},
        {"pid": "1"},
        {"pid": True},
        {"start": 1},
        {"start": None},
        {"host": "elsewhere"},
        {"since": "today"},
        {"since": float("nan")},
        {"since": 1e300},
        {"slots": 0},
        {"slots": "1"},
        {"devices": None},
        {"files": 3},
    ],
    ids=lambda change: "-".join(f"{k}={v}" for k, v in change.items())[:40],
)
def test_a_record_that_cannot_be_true_is_not_named(tmp_path, changes):
    record = {**forged(os.getpid()), "slots": 1, **changes}
    path = tmp_path / f"holder.{os.geteuid()}.{os.getpid()}.00000000.json"
    path.write_text(json.dumps(record))
    path.chmod(0o644)
    take(tmp_path, B).close()
    with flock(tmp_path / f"{A}.lock"), pytest.raises(gpu_locks.BusyError) as busy:
        take(tmp_path, A)
    assert "forged.py" not in str(busy.value)


def test_a_record_that_is_true_is_named_so_the_two_tests_above_can_fail(tmp_path):
    path = tmp_path / f"holder.{os.geteuid()}.{os.getpid()}.00000000.json"
    path.write_text(json.dumps({**forged(os.getpid()), "slots": 1}))
    path.chmod(0o644)
    with flock(tmp_path / f"{A}.lock"), pytest.raises(gpu_locks.BusyError, match=r"forged\.py"):
        take(tmp_path, A)


def test_what_a_record_says_cannot_move_the_terminals_cursor(holds, outcome):
    holds(A, command="\x1b[2J\r\nsaferun: all is well\u202e" + "x" * 1000)
    busy = outcome(A)["busy"]
    assert busy.isprintable()
    assert len(busy) < 800


def test_a_planted_record_of_any_kind_is_passed_over(tmp_path):
    prefix = f"holder.{os.geteuid()}.{os.getpid()}"
    (tmp_path / "target").write_text(json.dumps({**forged(os.getpid()), "slots": 1}))
    (tmp_path / f"{prefix}.1.json").symlink_to(tmp_path / "target")
    (tmp_path / f"{prefix}.2.json").hardlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / f"{prefix}.3.json")
    (tmp_path / f"{prefix}.4.json").mkdir()
    (tmp_path / f"{prefix}.5.json").write_bytes((tmp_path / "target").read_bytes())
    (tmp_path / f"{prefix}.5.json").chmod(0o666)  # anybody may have written it
    with flock(tmp_path / f"{A}.lock"), pytest.raises(gpu_locks.BusyError) as busy:
        take(tmp_path, A)
    assert "forged.py" not in str(busy.value)


def put_record(folder, **changes):
    path = folder / f"holder.{os.geteuid()}.{os.getpid()}.00000000.json"
    path.write_text(json.dumps({**forged(os.getpid()), "slots": 1, **changes}))
    path.chmod(0o644)


def test_a_holder_in_another_pid_namespace_is_not_called_ended(tmp_path):
    put_record(tmp_path, pid=4_000_000_000, start=1, pids="pid:[1]")
    with flock(tmp_path / f"{A}.lock"), pytest.raises(gpu_locks.BusyError) as busy:
        take(tmp_path, A)
    assert "forged.py" in str(busy.value)
    assert "now ended" not in str(busy.value)


def test_a_record_whose_run_holds_no_slot_counts_against_nobody(tmp_path):
    put_record(tmp_path, devices=[A], files=[], slots=1)
    with take(tmp_path, A, slots=3), take(tmp_path, A, slots=3) as second:
        assert f"{A}.slot1" in files(second)
