"""Which GPUs and hosts are named since they failed in two of their last five runs."""

import os
import stat

import pytest
from cases import check_cases
from outcomes import outcome

from saferun.errors import UsageError
from saferun.journal import part_history
from saferun.journal.part_history import RunOfParts
from saferun.model import GpuFacts, Identity, MachineFacts
from saferun.planning.inputs import RunInputs
from saferun.planning.request import read
from saferun.supervise.changes.parts import RunParts
from saferun.system import gpus

A, B = "GPU-aaaa", "GPU-bbbb"


def past(
    *failed: dict[str, str], host: str = "h", seen: tuple[str, ...] = (A, B)
) -> list[RunOfParts]:
    return [RunOfParts(f"run-{at}", float(at), host, seen, one) for at, one in enumerate(failed)]


ECC, LOST, WELL = {A: "gpu-ecc-uncorrectable"}, {A: "gpu-lost"}, {}
NAMED = {
    "twice": (past(ECC, LOST), [A]),
    "once": (past(ECC, WELL), []),
    "with others between": (past(ECC, WELL, WELL, LOST, WELL), [A]),
    "long ago": (past(ECC, LOST, WELL, WELL, WELL, WELL), []),
    "each GPU once": (past(ECC, {B: "gpu-lost"}), ["h"]),
    "one GPU, and another once": (past(ECC, LOST, {B: "gpu-lost"}), [A]),
    "nobody knows which": (past({"": "cuda-launch-failure"}, {"": "nccl-ib-link-down"}), ["h"]),
    "on another host": (past(ECC, LOST, host="other"), []),
    "it was not in the last runs": (
        [*past(ECC, LOST), *past(WELL, WELL, WELL, WELL, WELL, seen=(B,))],
        [A],
    ),
}


def test_a_part_is_named_after_two_failures_in_its_last_five_runs():
    def check(known, names):
        named = [part.name for part in part_history.of(known, "h", [A, B]) if part.is_named]
        assert named == names

    check_cases(NAMED, check)
    part = part_history.of(past(ECC, LOST), "h", [A])[0]
    said = part_history.sentence(part, 3)
    assert said.startswith(
        f"GPU 3 ({A}) failed in 2 of its last 2 runs: gpu-ecc-uncorrectable on 19"
    )
    assert "(run run-0), gpu-lost on " in said


# --- the file ------------------------------------------------------------------------------------


def test_a_run_is_kept_where_it_tells_something(home):
    environ = {"HOME": str(home)}
    (well, bad) = past(WELL, ECC)
    part_history.keep(environ, well, 3600.0)
    assert not os.path.exists(part_history.path(environ))
    part_history.keep(environ, bad, 5.0)
    part_history.keep(environ, well, 5.0)  # a typo
    part_history.keep(environ, well._replace(gpus=("GPU-cccc",), host="other"), 3600.0)
    assert part_history.load(environ) == (bad,)
    part_history.keep(environ, well, 3600.0)
    assert part_history.load(environ) == (well, bad)
    assert stat.S_IMODE(os.stat(part_history.path(environ)).st_mode) == 0o600


@pytest.mark.parametrize("name", [A, "GPU-aa", "h", None])
def test_failures_are_forgotten_by_gpu_host_or_all(home, name):
    environ = {"HOME": str(home)}
    known = (*past(ECC, LOST), *past({B: "gpu-lost"}, host="other"))
    part_history.change(environ, lambda _: known)
    gone = part_history.clear(environ, name)
    assert len(gone) == (3 if name is None else 2)
    left = [one.failed for one in part_history.load(environ) if one.failed]
    assert left == ([] if name is None else [{B: "gpu-lost"}])
    with pytest.raises(UsageError):
        part_history.clear(environ, "GPU-none")


def test_a_file_that_is_not_ours_is_no_history(home):
    file = part_history.path({"HOME": str(home)})
    os.makedirs(os.path.dirname(file), mode=0o700)
    for content in ("", "{", "[]", '{"schema": 1, "runs": [1]}', '{"schema": 9}'):
        with open(
            os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as opened:
            opened.write(content)
        assert part_history.load({"HOME": str(home)}) == ()


# --- whose failure it was ------------------------------------------------------------------------

PAIR = GpuFacts(tuple(gpus.Gpu(n, uuid, "NVIDIA H100") for n, uuid in ((4, A), (7, B))))
GUILTY = {
    "the rank's": ({"root_rank": 1}, {0, 1}, {B: "gpu-lost"}),
    "the rank's on the second node": ({"root_rank": 8}, {8, 9}, {A: "gpu-lost"}),
    "no receipts": ({"root_rank": 1}, (), {B: "gpu-lost"}),
    "another node's": ({"root_rank": 3}, {0, 1}, {"": "gpu-lost"}),
    "told by NVML": ({"gpu": B, "root_rank": 0}, {0, 1}, {B: "gpu-lost"}),
    "named by its UUID": ({"root_line": f"{A} is lost"}, (), {A: "gpu-lost"}),
    "unknown": ({}, (), {"": "gpu-lost"}),
    "a hang of one rank": ({"kind": "hang", "root_rank": 1}, {0, 1}, {B: "hang"}),
    "a hang of all": ({"kind": "hang"}, {0, 1}, None),
    "a hang of the only rank": ({"kind": "hang", "root_rank": 0}, {0}, None),
    "the user's own": ({"kind": "user-exception", "root_rank": 1}, {0, 1}, None),
    "the host's": (
        {"kind": "nccl-ib-link-down", "root_rank": 1},
        {0, 1},
        {"": "nccl-ib-link-down"},
    ),
}


@pytest.mark.parametrize(("facts", "ranks", "failed"), GUILTY.values(), ids=GUILTY)
def test_a_failure_is_the_gpus_that_its_line_or_its_rank_names(home, facts, ranks, failed):
    environ = {"HOME": str(home)}
    request = read(["train.py"], environ)
    gathered = RunInputs(request, None, MachineFacts(gpu=PAIR), environ, Identity("", "run-1"))
    parts = RunParts(gathered)
    parts.note(outcome(1, **{"kind": "gpu-lost", "root_line": "x", **facts}), ranks)
    parts.keep(100.0)
    kept = part_history.load(environ)
    assert [one.failed for one in kept] == ([] if failed is None else [failed])
    assert all(
        (one.run, one.gpus, one.host) == ("run-1", (A, B), os.uname().nodename) for one in kept
    )
