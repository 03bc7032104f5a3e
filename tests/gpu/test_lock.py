"""Who may be on a GPU: real processes, real users, the kernel's own locks; nothing is faked but
the clock of the tests that would otherwise have to wait."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pwd
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time

import filelock
import pytest

from saferun.errors import EXIT_BUSY, BusyError
from saferun.gpu import lock, lock_dir, lock_owner

A = "GPU-14e799be-cee2-7364-1ed2-56588c2c62e3"
B = "GPU-e533a614-68dd-10bf-5cbb-1d78bacbb601"
SLICE_1 = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"
SLICE_2 = "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"
CUT = {SLICE_1: A, SLICE_2: A}
DEADLINE_S = 60.0
NOBODY = 65534

# These tests fork on purpose; where pytest has threads, Python 3.12 and later say so.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become several users")

# One run: it takes its locks as told on argv, says on stdout what came of it, and ends with stdin.
RUN = """
import fcntl, json, os, pwd, subprocess, sys, time
from saferun.errors import BusyError
from saferun.gpu import lock, lock_dir, lock_owner
job = json.loads(sys.argv[1])
if job["uid"]:
    os.setgroups([]); os.setresgid(*[job["uid"]] * 3); os.setresuid(*[job["uid"]] * 3)
os.umask(0o077)
said = []
def say(line):
    said.append(line)
    if job["aloud"]:
        print(json.dumps({"said": line}), flush=True)
exec(job["first"])
try:
    held = lock.acquire(job["uuids"], job["policy"], environ=os.environ, say=say,
        owner=lock_owner.this_process(job["command"], "run-7"), directory=job["directory"],
        parents=job["parents"])
except BusyError as error:
    print(json.dumps({"busy": str(error), "said": said, "code": error.code}), flush=True)
    sys.exit(error.code)
print(json.dumps({"held": held.describe(), "said": said, "environ": held.environ()}), flush=True)
exec(job["then"])
sys.stdin.read()
held.close()
"""


class Run:
    """A process that has acquired, or is about to."""

    def __init__(self, directory, uuids, mode, *, prefix=(), env=None, wait_s=0, slots=1, **job):
        policy = {"gpus": mode, "wait_s": wait_s, "slots": slots}
        job = {"uid": 0, "first": "", "then": "", "parents": {}, "aloud": False, **job}
        job = {"command": "train.py", **job, "uuids": uuids, "policy": policy}
        job["directory"] = str(directory)
        environ = {k: v for k, v in os.environ.items() if k != "SAFERUN_LOCKS"}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-c", RUN, json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # else a second line hides from select in our own buffer
            env={**environ, "PYTHONPATH": os.pathsep.join(sys.path), **(env or {})},
        )
        self.pid = self.process.pid

    def answer(self):
        """What it says next, within the deadline."""
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], "no answer"
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def shared():
    """A directory that every user can reach, as /run/lock is; pytest's own are private."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="saferun-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start(shared):
    """Start runs on one lock directory; all have ended when the test has."""
    runs = []

    def start(*uuids, mode="refuse", directory=None, **options):
        runs.append(Run(directory or shared / "lock", uuids, mode, **options))
        return runs[-1]

    shared.joinpath("lock").mkdir()
    shared.joinpath("lock").chmod(0o1777)
    yield start
    for run in runs:
        run.process.kill()
        run.process.wait(DEADLINE_S)
        run.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            run.process.stdin.close()


@pytest.fixture
def holds(start):
    """Start a run that must get its locks."""

    def holds(*uuids, **options):
        run = start(*uuids, **options)
        run.first_words = run.answer()
        assert "held" in run.first_words, run.first_words
        return run

    return holds


@pytest.fixture
def outcome(start):
    """Start a run, let it end at once, and return what came of it."""

    def outcome(*uuids, **options):
        run = start(*uuids, **options)
        said = run.answer()
        run.end()
        return said

    return outcome


def until(condition):
    """Poll until it holds, up to the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, "it never came true"
        select.select([], [], [], 0.01)


def owner():
    return lock_owner.this_process("train.py", "run-7")


def no_wait(seconds):
    raise AssertionError(f"slept {seconds} s")


def take(directory, *uuids, mode="refuse", wait_s=0, slots=1, environ=None, say=None, **rest):
    """Acquire in this process."""
    policy = {"gpus": mode, "wait_s": wait_s, "slots": slots}
    say = say or (lambda line: pytest.fail(f"it said: {line}"))
    environ = {} if environ is None else environ
    directory = None if directory is None else str(directory)
    return lock.acquire(
        uuids, policy, environ=environ, owner=owner(), say=say, directory=directory, **rest
    )


# One run


def test_a_run_alone_says_nothing_and_names_what_it_holds(tmp_path):
    with take(tmp_path / "lock", A, B) as held:
        assert f"{A}.lock" in held.describe()
        assert f"{B}.slot0" in held.describe()
        assert held.beside == ()


def test_the_directory_is_sticky_and_the_files_are_empty_and_everybodys_whatever_the_umask(
    shared, start
):
    start(A, directory=shared / "new").answer()  # under umask 077
    assert stat.S_IMODE((shared / "new").stat().st_mode) == 0o1777
    files = [path for path in (shared / "new").iterdir() if path.suffix != ".json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666}
    assert {path.stat().st_size for path in files} == {0}
    assert len(files) == 3  # admission, A.lock, A.slot0


def test_the_record_is_readable_by_all_and_writable_by_its_owner_alone(tmp_path):
    with take(tmp_path, A):
        (record,) = tmp_path.glob("holder.*.json")
        assert stat.S_IMODE(record.stat().st_mode) == 0o644
    assert not list(tmp_path.glob("holder.*")), "given back, it is gone"


def test_lock_files_stay_and_keep_their_inode_when_the_lock_is_given_back(tmp_path):
    take(tmp_path, A).close()
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    take(tmp_path, A).close()
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before
    assert f"{A}.lock" in before


def test_an_existing_files_content_is_left_as_it_is(tmp_path):
    (tmp_path / f"{A}.lock").write_text("somebody's")
    take(tmp_path, A).close()
    assert (tmp_path / f"{A}.lock").read_text() == "somebody's"


def test_closing_twice_is_harmless(tmp_path):
    held = take(tmp_path, A)
    descriptors = held.descriptors()
    held.close()
    held.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize(
    ("uuids", "mode"),
    [((), "refuse"), (("",), "refuse"), ((A,), "off")],
    ids=["no-gpu", "gpu-without-uuid", "off"],
)
def test_where_there_is_nothing_to_lock_nothing_is_touched(tmp_path, uuids, mode):
    said = []
    held = take(tmp_path / "lock", *uuids, mode=mode, say=said.append)
    assert not (tmp_path / "lock").exists()
    assert held.environ() == {}
    assert held.descriptors() == ()
    assert [line for line in said if "UUID" not in line] == []
    assert len(said) == uuids.count("")


def test_importing_it_loads_nothing_heavy():
    code = "import sys; before = set(sys.modules); import saferun.gpu.lock; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    heavy = {"json", "filelock", "subprocess", "tempfile", "click", "torch", "logging"}
    assert heavy & set(done.stdout.split()) == set()


@pytest.mark.parametrize(
    ("uuid", "slots", "alone"),
    [(A, 1, True), (A, 2, False), (SLICE_1, 1, False)],
    ids=["whole", "slot", "slice"],
)
def test_only_a_whole_gpu_that_is_not_shared_is_held_alone(tmp_path, uuid, slots, alone):
    with take(tmp_path, uuid, slots=slots, parents=CUT) as held:
        assert held.alone() == alone
    assert not held.alone(), "given back"


# Two runs


def test_nobody_is_alone_while_a_run_that_was_warned_is_there(holds, shared):
    with take(shared / "lock", A) as held:
        assert held.alone()
        second = holds(A, mode="warn")
        assert not held.alone()
        second.end()
        assert held.alone()


def test_a_run_that_was_warned_is_not_alone(holds, shared):
    holds(A)
    with take(shared / "lock", A, mode="warn", say=lambda line: None) as held:
        assert not held.alone()
        assert len(held.beside) == 1


def test_refuse_ends_as_busy_and_names_pid_user_command_run_and_time(holds, outcome):
    first = holds(A)
    said = outcome(A, mode="refuse")
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert said["code"] == EXIT_BUSY == 75
    assert f"{A} is in use by pid {first.pid} of user {user} (train.py, since " in said["busy"]
    assert time.strftime("%Y-%m-%d") in said["busy"]
    assert "run run-7" in said["busy"]
    assert "--set locks.gpus=warn" in said["busy"]


def test_warn_starts_beside_it_and_tells_in_one_line_who_is_there(holds):
    first = holds(A, B)
    (line,) = holds(A, B, mode="warn").first_words["said"]
    assert line.startswith(f"2 GPUs ({A}, {B}) are in use by pid {first.pid} of user ")
    assert line.endswith("starting beside it (locks.gpus: warn)")
    assert line.count("pid") == 1


def test_a_run_that_was_warned_is_seen_after_the_first_has_gone(holds, outcome):
    first = holds(A)
    second = holds(A, mode="warn")
    first.end()
    assert f"pid {second.pid} of user " in outcome(A)["busy"]
    second.end()
    assert "held" in outcome(A)


def test_all_who_are_there_are_named_up_to_three(holds, outcome):
    runs = [holds(A, mode="warn") for _ in range(5)]
    text = outcome(A)["busy"]
    assert sum(f"pid {run.pid} " in text for run in runs) == 3
    assert "and 2 more" in text


def test_disjoint_sets_run_side_by_side(holds):
    holds(A)
    assert holds(B).first_words["said"] == []


def test_of_a_set_that_overlaps_nothing_is_kept(holds, outcome):
    holds(B)
    busy = outcome(A, B)["busy"]
    assert busy.startswith(f"{B} is in use")
    assert "held" in outcome(A)


def test_the_spelling_of_a_uuid_does_not_matter(holds, outcome):
    holds(A)
    assert "busy" in outcome("GPU-" + A[4:].upper() + " ")


# Waiting


def test_wait_gets_the_gpu_when_the_holder_ends_and_has_said_once_who_held_it(holds, start):
    first = holds(A)
    second = start(A, mode="wait", wait_s=60, aloud=True)
    line = second.answer()["said"]
    assert f"pid {first.pid} of user " in line
    assert "waiting for up to 60 s" in line
    first.end()
    answer = second.answer()
    assert "held" in answer
    assert len(answer["said"]) == 1


class Clock:
    """A clock that only sleeping moves."""

    now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


def test_wait_ends_as_busy_when_its_time_is_up(holds, shared):
    first, clock, said = holds(A), Clock(), []
    with pytest.raises(BusyError, match=rf"pid {first.pid} .*locks\.gpus: wait, 20 s"):
        take(
            shared / "lock",
            A,
            mode="wait",
            wait_s=20,
            say=said.append,
            clock=clock,
            sleep=clock.sleep,
        )
    assert clock.now == pytest.approx(120)
    assert len(said) == 1


def test_wait_for_no_time_is_a_refusal_at_once(holds, shared):
    holds(A)
    with pytest.raises(BusyError):
        take(shared / "lock", A, mode="wait", wait_s=0, sleep=no_wait)


def test_who_waits_for_two_gpus_holds_neither(holds, start, outcome):
    holds(B)
    start(A, B, mode="wait", wait_s=60, aloud=True).answer()
    assert "held" in outcome(A, mode="wait", wait_s=20)


def test_a_refused_run_leaves_no_descriptor_open(holds, shared):
    holds(A)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BusyError):
        take(shared / "lock", A, B)
    assert os.listdir("/proc/self/fd") == before


# Starting together


def race(directory, jobs, rounds):
    """Fork one run per job, `rounds` times, let them go together; yield how many held at once."""
    for _ in range(rounds):
        go_read, go = os.pipe()
        told, tell = os.pipe()
        pids = [_racer(directory, job, go_read, go, tell) for job in jobs]
        os.close(go_read)
        os.close(tell)
        os.close(go)  # the starting shot: every reader wakes
        with os.fdopen(told, "rb") as answers:
            results = answers.read(len(jobs))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        yield results.decode()


def _racer(directory, job, go_read, go, tell):
    pid = os.fork()
    if pid:
        return pid
    try:
        os.close(go)
        os.read(go_read, 1)
        try:
            take(directory, *job["uuids"], slots=job.get("slots", 1), say=lambda line: None)
            os.write(tell, b"h")
        except BusyError:
            os.write(tell, b"b")
        signal.pause()
    finally:
        os._exit(70)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jobs", "winners"),
    [
        ([{"uuids": [A]}] * 4, 1),
        ([{"uuids": [A, B]}, {"uuids": [B, A]}], 1),
        ([{"uuids": [A], "slots": 2}] * 5, 2),
        ([{"uuids": [A]}, {"uuids": [B]}], 2),
    ],
    ids=["one-gpu", "two-gpus-in-opposite-order", "two-slots", "disjoint"],
)
def test_of_runs_that_start_together_exactly_as_many_get_in_as_may(tmp_path, jobs, winners):
    counts = [results.count("h") for results in race(tmp_path, jobs, 200)]
    assert counts == [winners] * 200
    with take(tmp_path, A, B):
        assert len(list(tmp_path.glob("holder.*"))) == 1, "those of the killed are swept"


def test_a_stopped_process_that_was_let_in_does_not_keep_others_out_for_good(tmp_path):
    take(tmp_path, A).close()
    clock = Clock()
    with flock(tmp_path / "admission"):
        held = take(tmp_path, A, clock=clock, sleep=clock.sleep)
    assert f"{A}.lock" in held.describe()
    assert clock.now == pytest.approx(100 + lock.GATE_S, abs=0.1)
    held.close()


# The end of a run


def test_the_kernel_frees_the_locks_of_a_killed_run(holds, outcome):
    holds(A, B).kill()
    assert outcome(A, B)["said"] == []


def test_a_child_that_was_forked_keeps_the_gpu_and_is_told_of(holds, outcome):
    first = holds(A, then="fork = os.fork()\nif fork: print(fork, flush=True)")
    child = first.answer()
    first.process.kill()  # its child still has stdout: no EOF, so only the pid is reaped
    first.process.wait(DEADLINE_S)
    try:
        assert f"what pid {first.pid} of user " in outcome(A)["busy"]
        assert "now ended, has left running" in outcome(A)["busy"]
    finally:
        os.kill(child, signal.SIGKILL)
    until(lambda: "held" in outcome(A))


def test_a_forked_child_that_closes_leaves_its_parents_lock_and_record(shared, outcome, start):
    held = take(shared / "lock", A)
    pid = os.fork()
    if not pid:
        held.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert f"pid {os.getpid()} of user " in outcome(A)["busy"]
    held.close()


def test_a_started_program_does_not_hold_the_gpu(holds, outcome):
    started = "print(subprocess.Popen(['sleep', '60'], close_fds=False).pid, flush=True)"
    first = holds(A, then=started)
    sleeper = first.answer()
    first.kill()
    try:
        assert "held" in outcome(A)
    finally:
        os.kill(sleeper, signal.SIGKILL)


def test_a_program_that_replaces_the_run_holds_the_gpu_under_the_same_name(holds, outcome):
    become = "held.inheritable(); os.execvp('cat', ['cat'])"
    first = holds(A, then=become)
    until(lambda: pathlib.Path(f"/proc/{first.pid}/comm").read_text() == "cat\n")
    assert f"pid {first.pid} of user" in outcome(A)["busy"]
    first.end()
    assert "held" in outcome(A)


def test_a_child_that_is_handed_the_descriptors_keeps_the_gpu(holds, outcome):
    handed = "subprocess.Popen(['sleep', '60'], pass_fds=held.descriptors())"
    first = holds(A, then=f"print({handed}.pid, flush=True)")
    keeper = first.answer()
    first.kill()
    try:
        assert "busy" in outcome(A)
    finally:
        os.kill(keeper, signal.SIGKILL)
    until(lambda: "held" in outcome(A))


# Runs within runs


NESTED = """
done = subprocess.run([sys.executable, "-c", job["nested"], json.dumps(job["job"])],
    env={**os.environ, **held.environ()}, stdin=subprocess.DEVNULL,
    capture_output=True, text=True)
print(done.stdout.splitlines()[-1] if done.stdout else json.dumps(done.stderr), flush=True)
"""


def nested(holds, shared, uuids):
    """Let a run on A start another; return what came of that one."""
    job = {"uid": 0, "first": "", "then": "", "parents": CUT, "aloud": False, "uuids": uuids}
    job |= {"command": "inner.py", "directory": str(shared / "lock")}
    job["policy"] = {"gpus": "refuse", "wait_s": 0, "slots": 1}
    first = holds(A, then=NESTED, nested=RUN, job=job)
    return first, first.answer()


def test_a_nested_run_is_not_blocked_by_its_ancestor(holds, shared):
    first, answer = nested(holds, shared, [A])
    assert answer["held"] == "an ancestor holds the GPUs"
    assert answer["environ"] == first.first_words["environ"], "and its own children learn of it"


def test_a_nested_run_locks_what_its_ancestor_does_not_hold(holds, shared):
    first, answer = nested(holds, shared, [A, B])
    assert f"{B}.lock" in answer["held"]
    assert A not in answer["held"]
    ours, theirs = answer["environ"]["SAFERUN_LOCKS"].split(";")
    assert ours == first.first_words["environ"]["SAFERUN_LOCKS"]
    assert theirs.endswith(B)


def test_a_nested_run_on_a_slice_is_not_blocked_by_its_ancestor_on_the_gpu(holds, shared):
    assert nested(holds, shared, [SLICE_1])[1]["held"] == "an ancestor holds the GPUs"


@pytest.mark.parametrize(
    "claim",
    [
        f"1:1:{A}",
        f"{os.getpid()}:12:{A}",
        f"999999999999999999999:1:{A}",
        f"-1:1:{A}",
        "::;;:",
        "garbage",
        "\udcff:\u0663:" + A,
    ],
    ids=["start", "start-of-another", "huge", "negative", "empty", "garbage", "digits"],
)
def test_what_is_not_true_of_an_ancestor_is_not_believed(holds, shared, claim):
    holds(A)
    with pytest.raises(BusyError):
        take(shared / "lock", A, environ={"SAFERUN_LOCKS": claim})


def test_a_holder_that_is_no_ancestor_is_not_believed(holds, outcome):
    first = holds(A)
    claim = first.first_words["environ"]
    assert claim["SAFERUN_LOCKS"].startswith(f"{first.pid}:")
    assert "busy" in outcome(A, env=claim)


# Slots


@pytest.mark.parametrize(
    ("there", "newcomer", "gets_in"),
    [
        ([3, 3], 3, True),
        ([3, 3, 3], 3, False),
        ([4], 2, True),
        ([4, 4], 2, False),
        ([2, 4], 4, False),
        ([4, 2], 4, False),
        ([1], 3, False),
        ([3], 1, False),
    ],
    ids=[
        "third-of-three",
        "fourth-of-three",
        "wants-at-most-two-and-is-second",
        "wants-at-most-two-and-is-third",
        "one-there-wants-at-most-two",
        "one-there-came-later-and-wants-at-most-two",
        "one-there-wants-to-be-alone",
        "wants-to-be-alone",
    ],
)
def test_a_gpu_is_shared_by_no_more_runs_than_each_of_them_allows(
    holds, outcome, there, newcomer, gets_in
):
    for slots in there:
        holds(A, slots=slots)
    assert ("held" in outcome(A, slots=newcomer)) == gets_in


def test_a_slot_that_is_free_below_one_that_is_held_does_not_make_the_count_wrong(holds, outcome):
    runs = [holds(A, slots=3) for _ in range(3)]
    runs[0].end()
    assert "held" in outcome(A, slots=3)
    assert "busy" in outcome(A, slots=2)


def test_a_run_that_wants_to_be_alone_is_safe_from_sharers_even_if_its_record_is_lost(
    holds, outcome, shared
):
    holds(A)
    for record in (shared / "lock").glob("holder.*"):
        record.unlink()
    assert "busy" in outcome(A, slots=3)


def test_the_run_after_the_last_slot_waits_for_one(holds, start):
    first, _ = holds(A, slots=2), holds(A, slots=2)
    third = start(A, slots=2, mode="wait", wait_s=60, aloud=True)
    third.answer()
    first.end()
    assert "held" in third.answer()


# MIG


def test_two_slices_of_one_gpu_run_side_by_side(holds):
    holds(SLICE_1, parents=CUT)
    assert holds(SLICE_2, parents=CUT).first_words["said"] == []


@pytest.mark.parametrize(
    ("there", "newcomer"),
    [(SLICE_1, SLICE_1), (SLICE_1, A), (A, SLICE_1)],
    ids=["the-same-slice", "the-whole-after-a-slice", "a-slice-after-the-whole"],
)
@pytest.mark.parametrize("slots", [1, 2], ids=["alone", "sharing"])
def test_a_slice_is_held_alone_and_the_whole_gpu_excludes_slices(
    holds, outcome, there, newcomer, slots
):
    first = holds(there, parents=CUT, slots=slots if there == A else 1)
    busy = outcome(newcomer, parents=CUT, slots=slots if newcomer == A else 1)["busy"]
    assert f"pid {first.pid} of user " in busy


def test_a_slice_named_in_the_old_form_tells_its_gpu(holds, outcome):
    holds(f"MIG-{A}/13/0")
    assert "held" in outcome(f"MIG-{A}/7/0")
    assert "busy" in outcome(A)


# util-linux flock


@contextlib.contextmanager
def flock(path, *options):
    """util-linux flock holding a file until the block ends; yields its pid."""
    with subprocess.Popen(
        ["flock", *options, str(path), "sh", "-c", "echo held; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        yield holder.pid
        holder.stdin.close()


def flock_gets(path):
    return subprocess.run(["flock", "-n", str(path), "true"], check=False).returncode == 0


needs_flock = pytest.mark.skipif(not shutil.which("flock"), reason="no util-linux flock")


@needs_flock
@pytest.mark.parametrize("slots", [1, 3], ids=["alone", "sharing"])
@pytest.mark.parametrize("suffix", ["lock", "slot0"])
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
def test_a_run_beside_flock_is_seen_when_flock_has_gone(shared, holds, outcome):
    with flock(shared / "lock" / f"{A}.lock"):
        second = holds(A, mode="warn")
    assert f"pid {second.pid} of user " in outcome(A)["busy"]


@needs_flock
def test_flock_is_kept_out_by_a_run_that_wanted_to_be_alone_and_started_beside_sharers(
    shared, holds
):
    first = holds(A, slots=2)
    holds(A, mode="warn")
    first.end()
    assert not flock_gets(shared / "lock" / f"{A}.lock")


# The filelock package


@pytest.mark.parametrize("slots", [1, 3], ids=["alone", "sharing"])
def test_the_filelock_package_is_kept_out_while_we_hold_and_let_in_after(holds, shared, slots):
    run = holds(A, slots=slots)
    theirs = filelock.FileLock(shared / "lock" / f"{A}.lock", timeout=0, mode=0o666)
    with pytest.raises(filelock.Timeout):
        theirs.acquire()
    run.end()
    with theirs:
        assert theirs.is_locked


def test_whom_the_filelock_package_lets_in_keeps_us_out(shared, outcome):
    (shared / "lock").mkdir(mode=0o1777, exist_ok=True)
    (shared / "lock").chmod(0o1777)
    with filelock.FileLock(shared / "lock" / f"{A}.lock", mode=0o666):
        assert f"{A} is in use by pid {os.getpid()}" in outcome(A)["busy"]
    assert "held" in outcome(A)


# Users


@root
@pytest.mark.parametrize(
    ("first", "second"), [(0, NOBODY), (NOBODY, 0), (NOBODY, 1)], ids=["root", "user", "users"]
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
    assert outcome(A, uid=second, directory=folder)["said"] == []


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
    holds(A, uid=NOBODY).end()
    assert outcome(A, first=PROTECTED)["said"] == []


@root
def test_a_lock_file_that_another_user_made_read_only_still_locks(shared, start, outcome, holds):
    file = shared / "lock" / f"{A}.lock"
    file.touch(0o644)
    holds(A, uid=NOBODY)
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
    answer = outcome(A, uid=NOBODY, first=vandal)
    assert answer["said"] == []
    assert f"pid {first.pid} of user root" in answer["busy"]


def forged(pid, **changes):
    """A record as its writer would like it to be read."""
    record = lock_owner.this_process("forged.py", "run-0")._asdict()
    start = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    record |= {"pid": pid, "start": start, "slots": 4, "schema": 1}
    return {**record, "devices": [A], "files": [f"{A}.slot0", f"{A}.lock"], **changes}


@root
@pytest.mark.parametrize("name_uid", [0, NOBODY], ids=["in-roots-name", "in-own-name"])
def test_a_record_that_names_another_users_process_is_ignored(
    shared, holds, outcome, start, name_uid
):
    take(shared / "lock", A).close()
    path = shared / "lock" / f"holder.{name_uid}.1.00000000.json"
    path.write_text(json.dumps(forged(1)))
    path.chmod(0o644)
    os.chown(path, NOBODY, NOBODY)
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
        assert f"{A}.slot0" in held.describe()


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
    with flock(tmp_path / f"{A}.lock"), pytest.raises(BusyError) as busy:
        take(tmp_path, A)
    assert "forged.py" not in str(busy.value)


def test_a_record_that_is_true_is_named_so_the_two_tests_above_can_fail(tmp_path):
    path = tmp_path / f"holder.{os.geteuid()}.{os.getpid()}.00000000.json"
    path.write_text(json.dumps({**forged(os.getpid()), "slots": 1}))
    path.chmod(0o644)
    with flock(tmp_path / f"{A}.lock"), pytest.raises(BusyError, match=r"forged\.py"):
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
    with flock(tmp_path / f"{A}.lock"), pytest.raises(BusyError) as busy:
        take(tmp_path, A)
    assert "forged.py" not in str(busy.value)


# Places that cannot be used: one line, and the run goes on


def assert_runs_without_locks(held, said, reason):
    assert held.descriptors() == ()
    assert held.environ() == {}
    assert "locks are off" in held.describe()
    (line,) = said
    assert line.startswith("GPU locks are off for this run")
    assert reason in line


@pytest.mark.parametrize("file", [f"{A}.lock", f"{A}.slot0", "admission"])
@pytest.mark.parametrize("kind", ["symlink", "dangling", "directory", "pipe", "second-name"])
def test_a_planted_lock_file_is_not_followed(tmp_path, file, kind):
    place, victim = tmp_path / "lock", tmp_path / "victim"
    place.mkdir(mode=0o1777)
    victim.write_text("precious")
    plant(place / file, kind, victim)
    said = []
    held = take(place, A, say=said.append)
    assert_runs_without_locks(held, said, file)
    assert victim.read_text() == "precious"
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


@pytest.mark.parametrize("kind", ["symlink", "dangling", "pipe", "second-name"])
def test_a_planted_lock_directory_is_not_followed(tmp_path, kind):
    (tmp_path / "elsewhere").mkdir()
    victim = tmp_path / "elsewhere" if kind == "symlink" else tmp_path / "file"
    if kind == "second-name":
        victim.touch()
    plant(tmp_path / "lock", kind, victim)
    said = []
    assert_runs_without_locks(take(tmp_path / "lock", A, say=said.append), said, "lock")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_no_descriptor_is_left_where_locks_are_off(tmp_path):
    (tmp_path / f"{A}.slot0").mkdir()
    before = os.listdir("/proc/self/fd")
    take(tmp_path, A, say=lambda line: None)
    assert os.listdir("/proc/self/fd") == before


def test_a_directory_that_cannot_be_made_is_told(tmp_path):
    said = []
    held = take(tmp_path / "missing" / "lock", A, say=said.append)
    assert_runs_without_locks(held, said, "No such file or directory")


def test_our_own_directory_with_a_wrong_mode_is_put_right(tmp_path):
    (tmp_path / "lock").mkdir(mode=0o700)
    take(tmp_path / "lock", A).close()
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o1777


@root
@pytest.mark.parametrize("mode", [0o755, 0o777, 0o700, 0o1775], ids="{:o}".format)
def test_another_users_directory_that_is_not_sticky_and_everybodys_is_not_used(
    shared, outcome, mode
):
    (shared / "lock").chmod(mode)
    os.chown(shared / "lock", 1, 1)
    answer = outcome(A, uid=NOBODY)
    assert "locks are off" in answer["held"]
    assert len(answer["said"]) == 1


def mounted(options, directory):
    """A prefix that runs a command where `directory` is a tmpfs with these options."""
    words = f'mount -t tmpfs -o mode=1777,{options} none "$0" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", words, str(directory))


@root
@pytest.mark.parametrize(
    ("options", "reason"),
    [("ro", "Read-only file system"), ("nr_inodes=3", "No space left on device")],
    ids=["read-only", "full"],
)
def test_a_directory_that_takes_no_file_is_told_and_the_run_goes_on(
    shared, outcome, options, reason
):
    answer = outcome(A, prefix=mounted(options, shared / "lock"))
    assert "locks are off" in answer["held"]
    (line,) = answer["said"]
    assert reason in line


@root
def test_a_disk_that_is_full_for_the_record_alone_leaves_the_lock(shared, outcome):
    fill = "open(job['directory'] + '/fill', 'wb', buffering=0).write(bytes(65536))"
    answer = outcome(A, prefix=mounted("size=4k", shared / "lock"), first=fill)
    assert f"{A}.slot0" in answer["held"]
    (line,) = answer["said"]
    assert "others cannot learn" in line


NO_LOCKS = """
def rule(event, args):
    if event == "fcntl.flock":
        raise OSError(job["errno"], os.strerror(job["errno"]))
sys.addaudithook(rule)
"""


@pytest.mark.parametrize("code", ["ENOLCK", "ENOSYS", "EOPNOTSUPP", "EIO"])
def test_a_file_system_without_locks_is_told_and_the_run_goes_on(outcome, code):
    import errno

    answer = outcome(A, first=NO_LOCKS, errno=getattr(errno, code))
    assert "locks are off" in answer["held"]
    (line,) = answer["said"]
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


@root
def test_who_may_write_in_the_first_place_meets_who_may_not(shared, holds, outcome):
    several = [str(shared / "first" / "lock"), str(shared / "second" / "lock")]
    for place, mode in (("first", 0o755), ("second", 0o1777)):
        (shared / place).mkdir()
        (shared / place).chmod(mode)
    first = holds(A, uid=NOBODY, first=SEVERAL, several=several)
    assert several[1] in first.first_words["held"]
    assert f"pid {first.pid} of user " in outcome(A, first=SEVERAL, several=several)["busy"]


# Names


@pytest.mark.parametrize(
    ("uuid", "name"),
    [
        (A, A),
        (A.upper(), A),
        (f"MIG-{A}/13/0", f"MIG-{A}_13_0"),
        ("GPU-../../etc/passwd", "GPU-______etc_passwd"),
        ("GPU-\0\n;é", "GPU-____"),
        ("GPU-" + "0" * 300, "GPU-" + "0" * 120),
    ],
    ids=["plain", "upper-case", "old-mig", "path", "strange", "long"],
)
def test_a_uuid_makes_one_file_name_and_never_a_path(uuid, name):
    assert lock.device_name(uuid) == name


def test_a_slice_is_not_locked_twice_beside_its_own_gpu(tmp_path):
    with take(tmp_path, A, SLICE_1, parents=CUT) as held:
        assert SLICE_1 not in held.describe()


def test_descriptors_are_closed_on_exec_unless_asked_for(tmp_path):
    with take(tmp_path, A) as held:
        assert [os.get_inheritable(fd) for fd in held.descriptors()] == [False, False]
        held.inheritable()
        assert [os.get_inheritable(fd) for fd in held.descriptors()] == [True, True]
