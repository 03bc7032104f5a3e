"""The lock files: other programs that lock them, and directories that cannot be used."""

import errno
import os
import shutil
import stat
import subprocess

import filelock
import pytest
from lock_runs import A, flock, take
from rights import STRANGER, needs

from saferun.gpu.lock import lock_dir

# util-linux flock


def flock_gets(path):
    return subprocess.run(["flock", "-n", str(path), "true"], check=False).returncode == 0


needs_flock = pytest.mark.skipif(not shutil.which("flock"), reason="no util-linux flock")


@needs_flock
@pytest.mark.parametrize(("slots", "suffix"), [(1, "lock"), (3, "lock"), (3, "slot0")])
def test_flock_is_kept_out_while_we_hold_and_let_in_after(holds, shared, slots, suffix):
    run = holds(A, slots=slots)
    file = shared / "lock" / f"{A}.{suffix}"
    assert not flock_gets(file)
    run.end()
    assert flock_gets(file)


@needs_flock
@pytest.mark.parametrize("slots", [1, 3], ids=["alone", "sharing"])
def test_whom_flock_lets_in_keeps_us_out_and_is_named_by_the_kernel(shared, start, outcome, slots):
    with flock(shared / "lock" / f"{A}.lock") as pid:
        assert f"{A} is in use by pid {pid} (flock)" in outcome(A, slots=slots)["busy"]
    assert "held" in outcome(A, slots=slots)


@needs_flock
def test_flock_is_kept_out_by_a_run_that_wanted_to_be_alone_and_started_beside_sharers(
    shared, holds
):
    first = holds(A, slots=2)
    holds(A, mode="warn")
    first.end()
    assert not flock_gets(shared / "lock" / f"{A}.lock")


# The filelock package


def test_the_filelock_package_and_a_run_keep_each_other_out(holds, shared, outcome):
    run = holds(A, slots=3)
    theirs = filelock.FileLock(shared / "lock" / f"{A}.lock", timeout=0, mode=0o666)
    with pytest.raises(filelock.Timeout):
        theirs.acquire()
    run.end()
    with theirs:
        assert f"{A} is in use by pid {os.getpid()}" in outcome(A)["busy"]
    assert "held" in outcome(A)


# Places that cannot be used: one line, and the run goes on


def assert_runs_without_locks(held, messages, reason):
    assert held.descriptors() == ()
    assert held.environ() == {}
    (line,) = messages
    assert line.startswith("GPU locks are off for this run")
    assert reason in line


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("symlink", f"{A}.lock"),
        ("dangling", "admission"),
        ("directory", f"{A}.slot0"),
        ("pipe", f"{A}.lock"),
        ("second-name", "admission"),
    ],
)
def test_a_planted_lock_file_is_not_followed(tmp_path, file, kind):
    place, victim = tmp_path / "lock", tmp_path / "victim"
    place.mkdir(mode=0o1777)
    victim.write_text("precious", encoding="utf-8")
    plant(place / file, kind, victim)
    messages = []
    before = os.listdir("/proc/self/fd")
    held = take(place, A, mode="warn", say=messages.append)
    assert os.listdir("/proc/self/fd") == before
    assert_runs_without_locks(held, messages, file)
    assert victim.read_text(encoding="utf-8") == "precious"
    assert stat.S_IMODE(victim.stat().st_mode) != 0o666
    assert not (tmp_path / "nowhere").exists()


def plant(path, kind, victim):
    if kind == "symlink":
        path.symlink_to(victim)
    elif kind == "dangling":
        path.symlink_to(victim.with_name("nowhere"))
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.hardlink_to(victim)


@needs("become others")
@pytest.mark.parametrize(
    ("kind", "file", "policy"),
    [
        ("closed", f"{A}.lock", "refuse"),
        ("symlink", f"{A}.slot0", "wait"),
        ("directory", "admission", "refuse"),
        ("pipe", f"{A}.slot0", "wait"),
        ("second-name", f"{A}.lock", "refuse"),
    ],
)
def test_where_a_lock_must_hold_a_strangers_file_in_its_place_is_busy(
    shared, outcome, file, kind, policy
):
    (shared / "lock").mkdir(exist_ok=True)
    (shared / "lock").chmod(0o1777)
    (shared / "victim").touch()
    if kind == "closed":
        (shared / "lock" / file).touch(0o600)
    else:
        plant(shared / "lock" / file, kind, shared / "victim")
    answer = outcome(A, mode=policy, uid=STRANGER)
    assert answer["code"] == 75
    assert "cannot be known" in answer["busy"]
    assert file in answer["busy"]
    assert "locks.gpus=warn" in answer["busy"]
    assert "locks are off" in outcome(A, mode="warn", uid=STRANGER)["messages"][0]


@pytest.mark.parametrize("kind", ["symlink", "dangling", "pipe", "second-name", "no parent"])
def test_a_planted_lock_directory_is_not_followed(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    victim = tmp_path / "elsewhere" if kind == "symlink" else tmp_path / "file"
    if kind == "second-name":
        victim.touch()
    if kind != "no parent":
        plant(tmp_path / "lock", kind, victim)
    place = tmp_path / ("lock" if kind != "no parent" else "missing/lock")
    messages = []
    assert_runs_without_locks(take(place, A, say=messages.append), messages, "lock")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_our_own_directory_with_a_wrong_mode_is_put_right(tmp_path):
    (tmp_path / "lock").mkdir(mode=0o700)
    take(tmp_path / "lock", A).close()
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o1777


@needs("become others")
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o700, 0o1775], ids="{:o}".format)
def test_another_users_directory_that_is_not_sticky_and_everybodys_is_not_used(
    shared, outcome, mode
):
    (shared / "lock").chmod(mode)
    os.chown(shared / "lock", 1, 1)
    answer = outcome(A, uid=STRANGER)
    assert answer["held"] == ""
    assert len(answer["messages"]) == 1


def mounted(options, directory):
    """A prefix that runs a command where `directory` is a tmpfs with these options."""
    argv = f'mount -t tmpfs -o mode=1777,{options} none "$0" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", argv, str(directory))


@needs("make namespaces")
@pytest.mark.parametrize(
    ("options", "reason"),
    [("ro", "Read-only file system"), ("nr_inodes=3", "No space left on device")],
    ids=["read-only", "full"],
)
def test_a_directory_that_takes_no_file_is_told_and_the_run_goes_on(
    shared, outcome, options, reason
):
    answer = outcome(A, prefix=mounted(options, shared / "lock"))
    assert answer["held"] == ""
    (line,) = answer["messages"]
    assert reason in line


@needs("make namespaces")
def test_a_disk_that_is_full_for_the_record_alone_leaves_the_lock(shared, outcome):
    fill = "open(job['directory'] + '/fill', 'wb', buffering=0).write(bytes(65536))"
    answer = outcome(A, prefix=mounted("size=4k", shared / "lock"), first=fill)
    assert f"{A}.slot0" in answer["held"]
    (line,) = answer["messages"]
    assert "others cannot learn" in line


NO_LOCKS = """
def rule(event, args):
    if event == "fcntl.flock":
        raise OSError(job["errno"], os.strerror(job["errno"]))
sys.addaudithook(rule)
"""


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EIO"])
def test_a_file_system_without_locks_is_told_and_the_run_goes_on(outcome, code):

    answer = outcome(A, first=NO_LOCKS, errno=getattr(errno, code))
    assert answer["held"] == ""
    (line,) = answer["messages"]
    assert os.strerror(getattr(errno, code)) in line


# A cleaner of /tmp takes the file away between its opening and its locking, once.
CLEANER = """
def clean(event, args, done=[]):
    if event == "fcntl.flock" and not done:
        path = os.readlink(f"/proc/self/fd/{args[0]}")
        if path.endswith(job["cleaned"]):
            done.append(os.unlink(path))
sys.addaudithook(clean)
"""


@needs_flock
@pytest.mark.parametrize("suffix", ["lock", "slot0"])
def test_a_file_that_is_removed_before_it_is_locked_is_made_again(holds, shared, suffix):
    file = shared / "lock" / f"{A}.{suffix}"
    holds(A, first=CLEANER, cleaned=file.name)
    assert file.exists()
    assert not flock_gets(file)


# Where the machine's locks are


def test_locks_are_below_run_lock_else_in_the_temporary_directory():
    assert lock_dir._directories({}) == ["/run/lock/saferun", "/tmp/saferun-lock"]
    assert lock_dir._directories({"TMPDIR": "/scratch"})[2:] == ["/scratch/saferun-lock"]
    assert len(lock_dir._directories({"TMPDIR": "relative"})) == 2


SEVERAL = "lock_dir._directories = lambda environ: job['several']; job['directory'] = None"


@needs("become others")
def test_who_may_write_in_the_first_place_meets_who_may_not(shared, holds, outcome):
    several = [str(shared / "first" / "lock"), str(shared / "second" / "lock")]
    for place, mode in (("first", 0o755), ("second", 0o1777)):
        (shared / place).mkdir()
        (shared / place).chmod(mode)
    first = holds(A, uid=STRANGER, first=SEVERAL, several=several)
    assert several[1] in first.first_words["held"]
    assert f"pid {first.pid} of user " in outcome(A, first=SEVERAL, several=several)["busy"]
