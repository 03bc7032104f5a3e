"""The `tensorflow` hook in a real TensorFlow, on logical CPU devices."""

import json
from collections.abc import Callable

import pytest
from interpreters import Ran
from repo import ROOT

pytestmark = pytest.mark.tensorflow
PROGRAMS = ROOT / "tests" / "programs" / "tensorflow"
Job = Callable[..., Ran]


def lines_marked(program: str) -> dict[str, str]:
    """Return {mark: "file:line"} of the lines that end in "# line: MARK"."""
    path = PROGRAMS / program
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    found = {line.partition("# line: ")[2]: f"{path}:{number}" for number, line in lines}
    return {mark: place for mark, place in found.items() if mark}


def right(count: int) -> list[float]:
    return [float(sum(range(1, count + 1)))] * count


def test_without_the_hook_hierarchical_copy_leaves_a_replica_out_of_odd_counts(job):
    found = json.loads(job("sums.py", "one-device", "hierarchical", hook=None).out)
    for count in range(1, 6):
        assert found[f"{count} one-device"] == ["ReductionToOneDevice", right(count)]
        _, sums = found[f"{count} hierarchical"]
        assert (sums == right(count)) is (count in (1, 2, 4)), sums


def test_with_the_hook_every_sum_is_right_and_what_the_script_passes_is_kept(job):
    ran = job("sums.py", "none", "one-device", "hierarchical")
    found = json.loads(ran.out)
    chosen = {2: "HierarchicalCopyAllReduce", 4: "HierarchicalCopyAllReduce"}
    chosen |= {1: "CollectiveAllReduce", 3: "ReductionToOneDevice", 5: "ReductionToOneDevice"}
    for count, name in chosen.items():
        assert found[f"{count} none"] == [name, right(count)]
        assert found[f"{count} one-device"][0] == "ReductionToOneDevice"
        assert found[f"{count} hierarchical"][0] == "HierarchicalCopyAllReduce"
    made = [line for line in ran.by("tensorflow", "applied") if line.get("part") == "strategy"]
    reported = {line["replicas"]: line["effective"]["cross_device_ops"] for line in made}
    assert reported == {count: name for count, name in chosen.items() if count > 1}
    used = [line["effective"] for line in ran.receipts if line.get("part") == "reduction"]
    assert {"cross_device_ops": "HierarchicalCopyAllReduce"} in used
    assert "adds up wrongly for 3 replicas" in ran.err


def test_what_is_done_too_late_or_twice_is_said_once_with_its_line(job):
    ran = job("misuse.py")
    assert ran.code == 0, ran.err
    assert ran.out.splitlines()[-1] == "True 1"
    at = lines_marked("misuse.py")
    messages = [line for line in ran.err.splitlines() if line.startswith("saferun: ")]
    expected = [
        (at["variable late"], "CUDA_VISIBLE_DEVICES is set after", at["first look"]),
        (at["choice late"], "set_visible_devices comes after", at["initialised"]),
        (at["nested"], "inside another scope", ""),
        (at["second and odd"], "adds up wrongly for 3 replicas", ""),
        (at["second and odd"], "a second MirroredStrategy", ""),
        (at["alone"], "found no GPU", ""),
    ]
    assert len(messages) == len(expected), messages
    for line, (place, text, other) in zip(messages, expected, strict=True):
        assert line.startswith(f"saferun: {place}: "), line
        assert text in line
        assert other in line


def test_without_the_hook_nothing_is_said_and_the_job_is_the_same(job):
    ran = job("misuse.py", hook={"cross_device_ops": "keep", "memory_growth": False})
    assert (ran.code, ran.out.splitlines()[-1], ran.err) == (0, "True 1", "")


@pytest.mark.parametrize(
    ("hook", "exported", "grows"),
    [
        ({"memory_growth": True}, {}, True),
        ({"memory_growth": True}, {"TF_FORCE_GPU_ALLOW_GROWTH": "false"}, False),
        ({"memory_growth": False}, {}, False),
    ],
    ids=["on", "the user exported the contrary", "off"],
)
def test_every_gpu_grows_where_the_profile_says_so_and_none_is_asked_for(
    job, hook, exported, grows
):
    ran = job("growth.py", hook=hook, **exported)
    found = json.loads(ran.out)
    assert found["before"] == 0  # looks before the script's own
    assert [bool(one) for one in found["grows"]] == [grows, grows]
    default = "true" if grows else None
    assert found["variable"] == exported.get("TF_FORCE_GPU_ALLOW_GROWTH", default)


def test_a_reduction_that_xla_leaves_aside_is_said_and_the_receipt_has_what_ran(job):
    ran = job("xla_step.py")
    place = lines_marked("xla_step.py")["strategy"]
    assert f"saferun: {place}: XLA compiles the step" in ran.err
    used = [line["effective"] for line in ran.receipts if line.get("part") == "reduction"]
    assert used == [{"cross_device_ops": "CollectiveAllReduce"}]
