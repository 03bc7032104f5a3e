"""Where the watch asks for the records of torch's flight recorder."""

from __future__ import annotations

import pytest
from requested import TORCH, requested

from saferun.model import Facts, Gpu, GpuFacts, Identity, LaunchPlan
from saferun.planning.build import build_plan
from saferun.planning.own_variables import DUMPS, PIPE
from saferun.profile.merge import Conditions, resolve
from saferun.profile.schema import Doc, Leaf

ON = {"watch.mode": Leaf("warn")}
GPUS = GpuFacts((Gpu(0, "GPU-a", "NVIDIA H100"),), "proc")
HERE = "/run/flight"


def planned(leaves=None, environ=None, flight=HERE) -> LaunchPlan:
    doc = Doc("p.yaml", "p", "", (), (), ON if leaves is None else leaves)
    facts = Facts(gpu=GPUS, torch=TORCH, launcher=("torchrun",), python="python")
    at = Conditions(TORCH, 1, distributed=False)
    profile = resolve([doc], (), at, named=True, origin="--profile")
    identity = Identity("/pkg/inject/site", flight=flight)
    return build_plan(requested("t.py"), profile, facts, environ or {}, identity)


def given(plan: LaunchPlan) -> dict[str, str]:
    return {name: plan.env[name].value for name in (PIPE, *DUMPS) if name in plan.env}


def test_the_pipe_and_the_dumps_are_in_a_directory_of_the_run():
    assert given(planned()) == dict.fromkeys((PIPE, *DUMPS), "/run/flight/rank-")


@pytest.mark.parametrize(
    "changed",
    [
        {"leaves": {"watch.mode": Leaf("off")}},
        {"flight": None},
        {"leaves": {**ON, "retry.attempts": Leaf(1)}},
    ],
    ids=["no watch", "no place", "nobody beside the job"],
)
def test_nothing_is_set_where_nobody_would_ask(changed):
    assert given(planned(**changed)) == {}


def test_what_the_user_or_the_profile_names_is_kept():
    mine = {PIPE: "/mine/pipe-", DUMPS[1]: "/mine/dump-"}
    assert given(planned(environ=mine)) == {}
    leaves = {**ON, f"env.{DUMPS[0]}": Leaf("/theirs-")}
    assert given(planned(leaves)) == {PIPE: "/run/flight/rank-", DUMPS[0]: "/theirs-"}
