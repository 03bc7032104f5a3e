"""The account of a diagnosis: which lines weighed how much, and what nearly fits."""

# ruff: noqa: E501 (what programs print is not wrapped)

import pytest
from job_logs import FULL_CARD, KNOWN, TIMEOUT, TRACEBACK, output

from saferun.diagnosis.deciding import classify
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.explaining.explain import Account, account, as_document, as_lines
from saferun.diagnosis.foreign import long_log

FLOOD = output(200, "the master is at step {}")
ILLEGAL = "RuntimeError: CUDA error: an illegal memory access was encountered"


def explained(log: str, exit_code: int | None = None) -> Account:
    evidence = Evidence(log=long_log.read([log.encode()]), exit_code=exit_code)
    return account(classify.read(evidence, KNOWN), KNOWN)


def test_each_line_that_speaks_for_a_kind_is_shown_with_its_weight_the_heaviest_first():
    found = explained(f"{TIMEOUT}\n{TRACEBACK}KeyError: 'label'\n").lines
    assert [(one.kind, one.weight, one.line, one.by) for one in found] == [
        ("user-exception", 50, 5, "exception KeyError"),
        ("nccl-timeout", 30, 1, "sign: watchdog caught collective operation timeout"),
    ]


def test_what_takes_weight_from_a_line_is_said():
    log = (
        f"{TRACEBACK}OSError: [Errno 28] No space left on device\n{output(500, 'batch')}"
        f"WARNING: stale file handle\n{output(500)}{TRACEBACK}KeyError: 'label'\n"
    )
    why = {one.kind: (one.weight, one.why) for one in explained(log).lines}
    assert why["stale-file-handle"] == (0, ("a warning", "the job made steps after it"))
    lived_on = ("the job lived on: many lines follow", "the job made steps after it")
    assert why["disk-full"] == (0, lived_on)
    assert why["user-exception"] == (50, ())
    log = FULL_CARD.replace("has 22.53 GiB", "has 0.53 GiB").replace("21.70 GiB", "0.40 GiB")
    (one,) = explained(log).lines
    assert (one.kind, one.why) == ("cuda-oom-other-process", ("its message is that of cuda-oom",))


@pytest.mark.parametrize(
    ("log", "kinds", "why"),
    [
        (f"{TRACEBACK}ValueError: bad batch\n\n{TRACEBACK}RuntimeError: Address already in use\n",
         ["port-in-use", "user-exception"], "an exception of the script's own ended the job"),
        (f"PytorchStreamReader failed reading zip archive: failed finding central directory\n{TIMEOUT}",
         ["nccl-timeout", "checkpoint-corrupt"], "the log reports it before the echo"),
        ("UserWarning: NVIDIA X with CUDA capability sm_120 is not compatible with the current PyTorch installation.\nSegmentation fault (core dumped)\n",
         ["segfault", "cuda-no-kernel-image"], "the other one is its consequence"),
    ],
)  # fmt: skip
def test_each_step_to_the_root_cause_is_said(log, kinds, why):
    steps = explained(log).decision
    assert [step.kind for step in steps] == kinds
    assert steps[-1].why == why
    assert as_document(explained(log))["decision"][-1]["why"] == why


@pytest.mark.parametrize(
    ("log", "kind", "line", "against"),
    [
        ("INFO NCCL Failed to open libibverbs.so[.1]\nbye\n", "nccl-ib-error", 1,
         "but as information, not as a failure"),
        ("x Connection refused\n", "rendezvous-connect-failed", 1, "or another of 6"),
        (FLOOD + "failed to connect to the master\n" + FLOOD, "rendezvous-connect-failed", 201,
         "or another of 13"),
        ("config has no run_id, generated a random one\n", "torchrun-misuse", 1,
         "but nowhere `rendezvoustimeouterror`"),
        (output(100) + "device acquire failed\n", "cuda-devices-busy", 101,
         "in a log this long it does not count"),
        ("srun: Terminating StepId=7.0\nslurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025 ***\n",
         "job-cancelled", 2, "above it stands `terminating job step` or `terminating stepid=`"),
    ],
)  # fmt: skip
def test_a_sign_that_does_not_count_says_which_condition_is_not_met(log, kind, line, against):
    near = {one.kind: one for one in explained(log).near}[kind]
    assert near.line == line
    assert near.against.endswith(against)


def test_a_place_that_a_sign_above_has_taken_is_said():
    near = {one.kind: one.against for one in explained(f"{TRACEBACK}{ILLEGAL}\n").near}
    assert near["cuda-error-other"] == (
        "`cuda error:` is there, but the sign of cuda-illegal-access, which stands above its own, "
        "fits as well"
    )
    assert "cuda-illegal-access" not in near
    assert "have not `autotune_to_one_config` or " in near["inductor-autotune-error"]


def test_an_exit_status_weighs_beside_the_log():
    found = explained("hello\n", exit_code=-11)
    assert [(one.kind, one.line, one.by) for one in found.lines] == [("segfault", 0, "exit code")]
    assert "beside the log" in "\n".join(as_lines(found))
    assert list(as_lines(explained("all is well\n"))) == ["nothing in it weighed anything"]


def test_what_people_read_is_bounded():
    log = "".join(f"ValueError: bad {'x' * n}\nthen\n" for n in range(200))
    shown = list(as_lines(explained(log)))
    assert len(shown) < 100
    assert shown[0] == "what weighed, the heaviest first:"
    assert any("more (all with --json)" in line for line in shown)
