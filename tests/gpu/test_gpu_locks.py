"""What a run locks, what it does where another run has the GPU, and when the lock is free again."""

import os
import pathlib
import signal
import stat
import time

import pytest
from helpers import until
from lock_runs import CUT, DEADLINE_S, SLICE_1, A, B, Clock, files, flock, no_wait, take
from users import name_of

from saferun.errors import EXIT_BUSY, BusyError
from saferun.gpu.lock import gpu_locks

# These tests fork on purpose; where pytest has threads, Python 3.12 and later say so.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

# One run


def test_a_run_holds_lock_and_slot_of_each_gpu_and_gives_back_files_as_they_were(tmp_path):
    place = tmp_path / "lock"
    take(place, A).close()
    (place / f"{B}.lock").write_text("somebody's", encoding="utf-8")
    before = {path.name: path.stat().st_ino for path in place.iterdir()}
    held = take(place, A, B)
    assert set(files(held)) == {f"{gpu}.{kind}" for gpu in (A, B) for kind in ("lock", "slot0")}
    (record,) = place.glob("holder.*.json")
    assert stat.S_IMODE(record.stat().st_mode) == 0o644
    descriptors = held.descriptors()
    held.close()
    held.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    after = {path.name: path.stat().st_ino for path in place.iterdir()}
    assert after.items() >= before.items()
    assert not list(place.glob("holder.*"))
    assert (place / f"{B}.lock").read_text(encoding="utf-8") == "somebody's"


@pytest.mark.parametrize("policy", ["refuse", "wait", "warn"])
def test_a_gpu_without_a_uuid_is_busy_where_a_lock_must_hold_and_else_costs_a_line(
    tmp_path, policy
):
    messages = []
    options = {"mode": policy, "wait_s": 1, "sleep": no_wait, "say": messages.append}
    if policy == "warn":
        with take(tmp_path / "lock", A, "", **options) as held:
            assert f"{A}.lock" in files(held)
        assert messages == [
            "a GPU without a UUID is not locked; other runs will not see this one on it"
        ]
        return
    with pytest.raises(BusyError, match="a GPU has no UUID") as busy:
        take(tmp_path / "lock", A, "", **options)
    assert "--set locks.gpus=warn" in busy.value.fix
    assert not (tmp_path / "lock").exists()


def test_the_directory_is_sticky_and_the_files_are_empty_and_everybodys_whatever_the_umask(
    shared, start
):
    start(A, directory=shared / "new").answer()  # under umask 077
    assert stat.S_IMODE((shared / "new").stat().st_mode) == 0o1777
    files = [path for path in (shared / "new").iterdir() if path.suffix != ".json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666}
    assert {path.stat().st_size for path in files} == {0}
    assert len(files) == 3  # admission, A.lock, A.slot0


@pytest.mark.parametrize(
    ("uuids", "mode"),
    [((), "refuse"), (("",), "warn"), ((A,), "off")],
    ids=["no-gpu", "gpu-without-uuid", "off"],
)
def test_where_there_is_nothing_to_lock_nothing_is_touched(tmp_path, uuids, mode):
    messages = []
    held = take(tmp_path / "lock", *uuids, mode=mode, say=messages.append)
    assert not (tmp_path / "lock").exists()
    assert held.environ() == {}
    assert held.descriptors() == ()
    assert [line for line in messages if "UUID" not in line] == []
    assert len(messages) == uuids.count("")


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


def test_a_run_that_was_warned_is_not_alone_nor_is_who_was_there(holds, shared):
    with take(shared / "lock", A) as held:
        assert held.alone()
        second = holds(A, mode="warn")
        assert not held.alone()
        with take(shared / "lock", A, mode="warn", say=lambda line: None) as third:
            assert not third.alone()
        second.end()
        assert held.alone()


def test_warn_starts_beside_it_tells_in_one_line_who_is_there_and_is_seen_itself(holds, outcome):
    first = holds(A, B)
    second = holds(A, B, mode="warn")
    (line,) = second.first_words["messages"]
    assert line.startswith(f"2 GPUs ({A}, {B}) are in use by pid {first.pid} of user ")
    assert line.endswith("starting beside it (locks.gpus: warn)")
    assert line.count("pid") == 1
    first.end()
    assert f"pid {second.pid} of user " in outcome(A)["busy"]
    second.kill()  # the kernel frees its locks
    assert outcome(A)["messages"] == []


def test_disjoint_sets_run_side_by_side_and_of_one_that_overlaps_nothing_is_kept(
    holds, outcome, shared
):
    holds(B)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(BusyError, match=f"{B} is in use"):
        take(shared / "lock", A, "GPU-" + B[4:].upper() + " ")
    assert os.listdir("/proc/self/fd") == before
    assert outcome(A)["messages"] == []


def test_refuse_ends_as_busy_and_names_pid_user_command_run_and_time(holds, outcome):
    first = holds(A)
    messages = outcome(A, mode="refuse")
    user = name_of(os.geteuid())
    assert messages["code"] == EXIT_BUSY == 75
    assert f"{A} is in use by pid {first.pid} of user {user} (train.py, since " in messages["busy"]
    assert time.strftime("%Y-%m-%d") in messages["busy"]
    assert "run run-7" in messages["busy"]
    assert "--set locks.gpus=warn" in messages["busy"]


def test_all_who_are_there_are_named_up_to_three(holds, outcome):
    runs = [holds(A, mode="warn") for _ in range(5)]
    text = outcome(A)["busy"]
    assert sum(f"pid {run.pid} " in text for run in runs) == 3
    assert "and 2 more" in text


# Waiting


def test_wait_gets_the_gpu_when_the_holder_ends_and_has_said_once_who_held_it(holds, start):
    first = holds(A)
    second = start(A, mode="wait", wait_s=60, aloud=True)
    line = second.answer()["messages"]
    assert f"pid {first.pid} of user " in line
    assert "waiting for up to 1 min" in line
    first.end()
    answer = second.answer()
    assert "held" in answer
    assert len(answer["messages"]) == 1


def test_wait_ends_as_busy_when_its_time_is_up(holds, shared):
    first, clock, messages = holds(A), Clock(), []
    with pytest.raises(BusyError, match=rf"pid {first.pid} .*locks\.gpus: wait, 20 s"):
        take(
            shared / "lock",
            A,
            mode="wait",
            wait_s=20,
            say=messages.append,
            clock=clock,
            sleep=clock.sleep,
        )
    assert clock.now == pytest.approx(120)
    assert len(messages) == 1


def test_who_waits_for_two_gpus_holds_neither(holds, start, outcome):
    holds(B)
    start(A, B, mode="wait", wait_s=60, aloud=True).answer()
    assert "held" in outcome(A, mode="wait", wait_s=20)


# Starting together


def race(directory, jobs, rounds):
    """Fork one run per job, `rounds` times, let them go together; yield how many held at once."""
    for _ in range(rounds):
        go_read, go = os.pipe()
        reported, tell = os.pipe()
        pids = [_racer(directory, job, go_read, go, tell) for job in jobs]
        os.close(go_read)
        os.close(tell)
        os.close(go)  # the starting shot: every reader wakes
        with os.fdopen(reported, "rb") as answers:
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
    assert f"{A}.lock" in files(held)
    assert clock.now == pytest.approx(100 + gpu_locks.GATE_S, abs=0.1)
    held.close()


# The end of a run


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


def test_a_program_that_replaces_the_run_holds_the_gpu_under_the_same_name(holds, outcome):
    become = "held.inheritable(); os.execvp('cat', ['cat'])"
    first = holds(A, then=become)
    until(lambda: pathlib.Path(f"/proc/{first.pid}/comm").read_text(encoding="utf-8") == "cat\n")
    assert f"pid {first.pid} of user" in outcome(A)["busy"]
    first.end()
    assert "held" in outcome(A)


@pytest.mark.parametrize(
    ("how", "keeps"), [("close_fds=False", False), ("pass_fds=held.descriptors()", True)]
)
def test_a_started_program_holds_the_gpu_only_where_it_is_handed_the_descriptors(
    holds, outcome, how, keeps
):
    first = holds(A, then=f"print(subprocess.Popen(['sleep', '60'], {how}).pid, flush=True)")
    sleeper = first.answer()
    first.kill()
    try:
        assert ("busy" in outcome(A)) is keeps
    finally:
        os.kill(sleeper, signal.SIGKILL)
    until(lambda: "held" in outcome(A))
