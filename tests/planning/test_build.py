"""Everything that is known makes one plan."""

import shlex
from collections.abc import Mapping

import pytest
from mitigation_plans import QUIET

from saferun.inject import contract
from saferun.model import Gpu, GpuFacts, Identity, MachineFacts, Request, as_tree
from saferun.planning import view
from saferun.planning.build import build_plan, conditions, disabled_plan
from saferun.planning.own_variables import DUMPS, OF_ATTEMPT, PIPE, SHARE_STORE, WORKER
from saferun.planning.torchrun import torchrun_args
from saferun.profile.merge import resolve
from saferun.profile.schema import Doc, Leaf

SITE = "/pkg/inject/site"
TWO = GpuFacts((Gpu(0, "GPU-a", "NVIDIA H100"), Gpu(1, "GPU-b", "NVIDIA H100")), "proc")
GPU_DOC = {"torchrun.nproc-per-node": Leaf("gpu", "one each", "docs")}


def request(*argv: str, environ: Mapping[str, str] | None = None) -> Request:
    line = torchrun_args.parse(argv).line
    return Request(line=line, options=torchrun_args.launch_options(line, environ or {}))


def planned(*argv, leaves=None, named=True, environ=None, gpus=TWO, **identity):
    environ = environ or {}
    doc = Doc("p.yaml", "p", "", (), ("H100",), GPU_DOC if leaves is None else leaves)
    facts = MachineFacts(
        gpu=gpus, torch="2.13.0", launcher=("/v/bin/torchrun",), python="/v/bin/python"
    )
    asked = request(*argv, environ=environ)
    at = conditions(asked, facts, named=named, starts_all=named)
    profile = resolve([doc], (), at, origin="--profile" if named else "detected")
    return build_plan(asked, profile, facts, environ, Identity(SITE, **identity))


def test_a_named_gpu_profile_starts_one_process_a_gpu():
    plan = planned("train.py", "--x")
    assert plan.command == ("/v/bin/torchrun", "--nproc-per-node=gpu", "train.py", "--x")
    assert plan.torchrun_args == ("--nproc-per-node=gpu", "train.py", "--x")


PATHS = dict.fromkeys((PIPE, *DUMPS), "/run/flight/rank-")


@pytest.mark.parametrize(
    ("given", "paths"),
    [
        ({}, PATHS),
        ({"leaves": {"watch.mode": Leaf("off")}}, {}),
        ({"flight": None}, {}),
        ({"leaves": {"retry.attempts": Leaf(1)}}, {}),
        ({"environ": {PIPE: "/mine/pipe-", DUMPS[1]: "/mine/dump-"}}, {}),
        (
            {"leaves": {f"env.{DUMPS[0]}": Leaf("/theirs-")}},
            {PIPE: PATHS[PIPE], DUMPS[0]: "/theirs-"},
        ),
    ],
    ids=["asked", "no watch", "no place", "nobody beside the job", "the user's", "the profile's"],
)
def test_a_flight_record_is_asked_for_where_somebody_reads_it_and_nobody_else_did(given, paths):
    env = planned("t.py", **{"flight": "/run/flight", **given}).env
    assert {name: env[name].value for name in (PIPE, *DUMPS) if name in env} == paths


@pytest.mark.parametrize(
    ("argv", "environ", "gpus", "distributed"),
    [
        (["t.py"], {}, TWO, True),
        (["--nproc-per-node=1", "t.py"], {}, TWO, False),
        (["--nproc-per-node=gpu", "t.py"], {}, TWO, True),
        (["--nproc-per-node=cpu", "t.py"], {}, GpuFacts(), True),
        (["--nnodes=2", "t.py"], {}, GpuFacts(), True),
        (["t.py"], {"PET_NPROC_PER_NODE": "4"}, GpuFacts(), True),
    ],
)
def test_distributed_means_more_than_one_rank(argv, environ, gpus, distributed):
    asked = request(*argv, environ=environ)
    at = conditions(asked, MachineFacts(gpu=gpus), named=True, starts_all=True)
    assert at.distributed is distributed
    detected = conditions(request("t.py"), MachineFacts(gpu=TWO), named=False, starts_all=False)
    assert not detected.distributed


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        (["--nproc_per_node=2", "train.py"], {}),
        (["train.py"], {"PET_NPROC_PER_NODE": "2"}),
        (["--nnodes=2", "train.py"], {}),
    ],
    ids=["count given", "PET count", "two nodes"],
)
def test_a_count_or_several_nodes_leave_the_arguments_alone(argv, environ):
    assert planned(*argv, environ=environ).torchrun_args == tuple(argv)


def test_a_detected_profile_never_changes_the_arguments_and_hints():
    plan = planned("train.py", named=False)
    assert plan.torchrun_args == ("train.py",)
    assert "2 GPUs and one process: --profile p starts one on each" in view.headline(plan)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["accelerate", "launch", "t.py"], "in place of `accelerate launch`"),
        (["/opt/bin/deepspeed", "t.py"], "in place of `deepspeed`"),
        (["srun", "t.py"], "in front of saferun"),
        (["python.py"], ""),
        (["--no-python", "bash", "run.sh"], ""),
    ],
)
def test_a_script_that_is_named_like_a_launcher_gets_a_hint(argv, part):
    remarks = " ".join(planned(*argv).remarks)
    assert part in remarks
    assert bool(part) is ("is taken for the script" in remarks)


@pytest.mark.parametrize("word", ["--rdzv-endpoint=h:1", "--master-port=1", "--nnodes=2"])
def test_standalone_is_no_default_where_the_user_says_where_to_meet(word):
    leaves = {"torchrun.standalone": Leaf("true"), "torchrun.no-python": Leaf("false")}
    assert planned(word, "t.py", leaves=leaves).torchrun_args == (word, "t.py")
    assert planned("t.py", leaves=leaves).torchrun_args == ("--standalone", "t.py")


@pytest.mark.parametrize(
    ("argv", "environ", "set_"),
    [
        (["--max-restarts=3", "t.py"], {}, True),
        (["t.py"], {"PET_MAX_RESTARTS": "1"}, True),
        (["--max-restarts=0", "t.py"], {}, False),
        (["t.py"], {}, False),
        (["--max-restarts=3", "t.py"], {SHARE_STORE: "0"}, False),
    ],
)
def test_torchruns_own_restarts_are_made_to_work(argv, environ, set_):
    assert (SHARE_STORE in planned(*argv, environ=environ).env) is set_


def test_python_is_started_where_the_profile_says_so():
    leaves = {"launcher": Leaf("python")}
    assert planned("t.py", leaves=leaves).command == ("/v/bin/python", "t.py")


def test_the_hooks_travel_in_two_variables_in_front_of_the_users_path():
    plan = planned("t.py", environ={"PYTHONPATH": f"src::{SITE}:/x"}, run="r1", receipts="/r")
    assert plan.env["PYTHONPATH"].value == f"{SITE}:src::/x"
    sent = contract.decode(plan.env[contract.VARIABLE].value)
    assert (sent["run"], sent["attempt"], sent["receipts"]) == ("r1", 1, "/r")
    assert sent["hooks"] == as_tree(plan.settings.hooks)
    assert set(planned("t.py", leaves=QUIET).env) == set(OF_ATTEMPT) - {WORKER}


def test_the_page_says_command_variables_with_reasons_hooks_and_retries():
    leaves = {
        **GPU_DOC,
        "env.X": Leaf("a b", "it helps", "https://example.org/x"),
        "env.KEPT": Leaf("1"),
        "hooks.compile.autotune": Leaf("off", "it fails", "somewhere"),
    }
    plan = planned("t.py", leaves=leaves, environ={"KEPT": "2"})
    made = view.as_json(plan)
    fixed = "schema profile launcher command torchrun_args script script_args env hooks retry "
    assert " ".join(made) == fixed + "locks notify start mitigations"
    assert set(made["env"]["PYTHONPATH"]) == {"value", "origin", "why", "source"}
    assert made["locks"]["devices"] == ["GPU-a", "GPU-b"]
    text = view.as_text(plan)
    for part in (
        "torchrun --nproc-per-node=gpu t.py",
        "X='a b'    [p.yaml]",
        "it helps <https://example.org/x>",
        "KEPT stays as you exported it    [p.yaml has 1]",
        "autotune off    [p.yaml]",
        "it fails <somewhere>",
        "attempts 3",
    ):
        assert part in text


def test_a_long_command_stays_one_command_for_a_shell():
    argv = [f"--option-{i}=a  b\n{i}" for i in range(30)]
    plan = planned("t.py", *argv)
    top = view.as_text(plan).split("\n\n")[0]
    shown = top[top.index("command") + len("command") :]
    assert shlex.split(shown.replace("\\\n", "\n")) == list(plan.command)


def test_disabled_means_torchrun_as_the_user_wrote_it():
    parsed = torchrun_args.parse(["--profile", "h100", "--nnodes=1", "t.py", "--profile", "x"])
    options = torchrun_args.launch_options(parsed.line, {})
    asked = Request(line=parsed.line, options=options)
    plan = disabled_plan(asked, MachineFacts(launcher=("/v/bin/torchrun",)))
    assert plan.disabled
    assert plan.command == ("/v/bin/torchrun", "--nnodes=1", "t.py", "--profile", "x")
    assert plan.env == {}
