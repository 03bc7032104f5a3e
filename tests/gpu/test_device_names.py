"""How GPUs are named in files, and what a run's ancestors hold for it."""

import os

import pytest
from lock_runs import CUT, PROGRAM, SLICE_1, A, B, files, take

from saferun.gpu import device_names
from saferun.gpu.lock import gpu_locks

# Runs within runs


NESTED = """
done = subprocess.run([sys.executable, job["nested"], json.dumps(job["job"])],
    env={**os.environ, **held.environ()}, stdin=subprocess.DEVNULL,
    capture_output=True, text=True)
print(done.stdout.splitlines()[-1] if done.stdout else json.dumps(done.stderr), flush=True)
"""


def nested(holds, shared, uuids):
    """Let a run on A start another; return what came of that one."""
    job = {"uid": 0, "first": "", "then": "", "parents": CUT, "aloud": False, "uuids": uuids}
    job |= {"command": "inner.py", "directory": str(shared / "lock")}
    job["policy"] = {"gpus": "refuse", "wait_s": 0, "slots": 1}
    first = holds(A, then=NESTED, nested=str(PROGRAM), job=job)
    return first, first.answer()


@pytest.mark.parametrize(
    ("uuids", "locked"), [([A], []), ([A, B], [B]), ([SLICE_1], [])], ids=["its", "more", "slice"]
)
def test_a_nested_run_locks_what_its_ancestor_does_not_hold(holds, shared, outcome, uuids, locked):
    first, answer = nested(holds, shared, uuids)
    for gpu in (A, B, SLICE_1):
        assert (f"{gpu}.lock" in answer["held"]) is (gpu in locked)
    ours = first.first_words["environ"]["SAFERUN_LOCKS"]
    ours_there, *theirs = answer["environ"]["SAFERUN_LOCKS"].split(";")
    assert (ours_there, [one.rpartition(":")[2] for one in theirs]) == (ours, locked)
    assert "busy" in outcome(A, env={"SAFERUN_LOCKS": ours}), "who is no child of it"


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
    with pytest.raises(gpu_locks.BusyError):
        take(shared / "lock", A, environ={"SAFERUN_LOCKS": claim})


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
    assert device_names.device_name(uuid) == name


def test_a_slice_is_not_locked_twice_beside_its_own_gpu(tmp_path):
    with take(tmp_path, A, SLICE_1, parents=CUT) as held:
        assert not any(SLICE_1 in name for name in files(held))
