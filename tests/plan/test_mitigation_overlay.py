"""A mitigation changes the next attempt's plan, overrides everything else and names itself."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import check_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from saferun.diagnosis import signatures
from saferun.errors import SaferunError
from saferun.inject import contract
from saferun.knowledge import loader
from saferun.knowledge.variable_names import LISTS, OTHER_NAME
from saferun.model import Facts, Identity, LaunchPlan, ProcessLimits, Request
from saferun.plan import mitigation_catalog, mitigation_overlay, torchrun_args
from saferun.plan.build import build_plan, conditions
from saferun.profile.merge import Given, resolve
from saferun.profile.schema import KEYS, Doc, Leaf
from saferun.profile.settings import replace
from saferun.supervise import probes

SHIPPED = Path(loader.__file__).with_name("mitigations.yaml")
DATA = yaml.safe_load(SHIPPED.read_text())["mitigations"]
ALL = mitigation_catalog.parse(DATA)
SITE = str(Path(loader.__file__).parents[1] / "inject" / "site")
ANSWERS = {
    "free": "40123",
    "fresh": "saferun-id",
    "open-files": "1048576",
    "fresh-directory": "/tmp/fresh",
    "newest-ptxas": "/usr/local/cuda/bin/ptxas",
    "reachable-interface": "eth7",
}
QUIET = {
    "hooks.init.barrier": Leaf("off"),
    "hooks.init.set_device": Leaf(False),
    "hooks.init.agree": Leaf("off"),
    "hooks.order.mode": Leaf("off"),
    "hooks.order.wrap_barrier": Leaf(False),
    "hooks.excepthook": Leaf("off"),
}


def planned(
    *names: str,
    arguments: tuple[str, ...] = ("t.py", "--lr", "1"),
    environ: dict[str, str] | None = None,
    leaves: dict[str, Leaf] | None = None,
    sets: tuple[Given, ...] = (),
    answers: dict[str, str] | None = None,
    receipts: str | None = None,
    torch: str | None = "2.13.0",
) -> LaunchPlan:
    """The plan of an attempt with these mitigations, as the loop makes it."""
    environ = environ or {}
    program = str(Path(sys.executable).with_name("torchrun"))
    facts = Facts(torch=torch, launcher=(program,), python=sys.executable)
    line = torchrun_args.parse(arguments).line
    request = Request(line=line, options=torchrun_args.launch_options(line, environ))
    doc = Doc("p.yaml", "p", "", (), (), leaves or {})
    at = conditions(request, facts, starts_all=False)
    profile = resolve([doc], sets, at, named=True, origin="--profile")
    identity = Identity(SITE, "run", 2, receipts)
    base = build_plan(request, profile, facts, environ, identity)
    answers = ANSWERS if answers is None else answers
    here = mitigation_overlay.situation(base, environ, torch, answers=answers)
    changed = mitigation_overlay.changes(ALL, names, here)
    return build_plan(request, profile, facts, environ, identity, changed)


def here(
    *arguments: str, environ: dict[str, str] | None = None, **what
) -> mitigation_overlay.Situation:
    """What a mitigation meets."""
    leaves = what.pop("leaves", None)
    base = planned(arguments=arguments or ("t.py",), environ=environ, leaves=leaves)
    facts = {"answers": ANSWERS, "torch": "2.13.0", **what}
    return mitigation_overlay.situation(base, environ or {}, facts.pop("torch"), **facts)


@pytest.mark.parametrize(
    ("name", "past", "usable"),
    [
        ("autotune-off", "torch._inductor.runtime.triton_heuristics", False),
        ("compile-off", "torch._inductor.runtime.triton_heuristics", True),
        ("compile-off", "torch", False),
        ("ddp-optimizer-off", "torch._dynamo.convert_frame", False),
        ("expandable-segments", "torch", True),
    ],
)
def test_a_mitigation_whose_hook_the_job_bypasses_is_not_tried_again(name, past, usable):
    situation = here()._replace(missed=frozenset({past}))
    assert mitigation_overlay.usable(ALL, name, (), situation) is usable
    assert mitigation_overlay.usable(ALL, name, (), here())


# --- the data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"envv": {}}, "unknown key `envv`"),
        ({"env": {"A": 1}}, "A is not text"),
        ({"env": ["A"]}, "`env` is not a mapping"),
        ({"hooks": {"compile": {"autotun": "off"}}}, "unknown setting hooks.compile.autotun"),
        ({"hooks": {"compile": {"autotune": "no"}}}, "hooks.compile.autotune cannot be 'no'"),
        ({"computed": {"A": "a-guess"}}, "there is no probe `a-guess`"),
        ({"torchrun": {"master-port": "fresh"}}, "--master-port cannot be `fresh`"),
        ({"process": {"nofiles": 3}}, "unknown key `nofiles`"),
        ({"excludes": ["b"]}, "excludes `b`, which is not a mitigation"),
        ({"torch": "2.8 and up"}, "is not a range"),
        ({"cost_percent": "30"}, "cost_percent is not a number"),
        ({"cost": ""}, "has no `cost`"),
    ],
)
def test_a_mitigation_that_the_code_would_not_understand_is_refused(body, message):
    with pytest.raises(SaferunError, match=message):
        mitigation_catalog.parse({"a": {"cost": "none", "why": "w", "source": "https://s", **body}})


def test_no_mitigation_promises_a_hook_that_does_not_exist():
    hooks = {path.stem for path in (Path(SITE).parent / "hooks").glob("*.py")}
    assert {hook for mitigation in ALL.values() for hook in mitigation.hooks} <= hooks


def test_the_hook_acts_on_the_mitigations_that_only_it_can_make():
    files = ("compile_mitigations.py", "tensorflow.py")
    text = "".join((Path(SITE).parent / "hooks" / name).read_text() for name in files)
    for mitigation in ALL.values():
        if mitigation.assign or mitigation.rank_directories:
            assert f'"{mitigation.name}"' in text
    assert ALL["ddp-optimizer-off"].assign == {"torch._dynamo.config.optimize_ddp": False}


def test_cheaper_mitigations_of_a_kind_are_tried_first_where_both_costs_were_measured():
    for kind in signatures.load().kinds.values():
        costs = [ALL[name].cost_percent for name in kind.mitigations]
        measured = [cost for cost in costs if cost is not None]
        assert measured == sorted(measured), kind.name


def test_every_mitigation_of_a_kind_can_follow_the_ones_before_it():
    """`excludes` must not end an escalation, but for the two that do the same."""
    blocked = [
        (kind.name, name)
        for kind in signatures.load().kinds.values()
        for at, name in enumerate(kind.mitigations)
        if set(ALL[name].excludes) & set(kind.mitigations[:at])
    ]
    assert {name for _, name in blocked} <= {"split-size"}


# --- what a mitigation changes -------------------------------------------------------------------

VARIABLES = {
    "expandable-segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    "split-size": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"},
    "autotune-off": {
        "TORCHINDUCTOR_MAX_AUTOTUNE": "0",
        "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "0",
        "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE": "0",
        "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "0",
    },
    "cudagraphs-off": {"TORCHINDUCTOR_CUDAGRAPHS": "0"},
    "compile-fallback": {},
    "compile-off": {},
    "ddp-optimizer-off": {},
    "fresh-compile-cache": {
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/fresh",
        "TRITON_CACHE_DIR": "/tmp/fresh",
    },
    "one-compile-thread": {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
    "newer-ptxas": {
        "TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas",
        "TRITON_PTXAS_BLACKWELL_PATH": "/usr/local/cuda/bin/ptxas",
    },
    "nccl-cumem-off": {"NCCL_CUMEM_ENABLE": "0"},
    "nccl-p2p-off": {"NCCL_P2P_DISABLE": "1"},
    "nccl-shm-off": {"NCCL_SHM_DISABLE": "1"},
    "nccl-ib-tune": {"NCCL_IB_TIMEOUT": "22"},
    "nccl-ib-off": {"NCCL_IB_DISABLE": "1"},
    "nvls-off": {"NCCL_NVLS_ENABLE": "0"},
    "nccl-socket-interface": {"NCCL_SOCKET_IFNAME": "=eth7"},
    "gloo-socket-interface": {"GLOO_SOCKET_IFNAME": "eth7"},
    "free-port": {},
    "fresh-rendezvous": {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    "more-open-files": {},
    "new-session": {},
    "tf-memory-growth": {"TF_FORCE_GPU_ALLOW_GROWTH": "true"},
    "tf-hierarchical-copy": {},
    "tf-xla-off": {"TF_XLA_FLAGS": "--tf_xla_auto_jit=-1"},
    "debug-settings": {
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "NCCL_DEBUG": "INFO",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
    },
    "debug-guards": {},
}
HOOKS = {
    "autotune-off": {"compile": {"autotune": "off"}},
    "cudagraphs-off": {"compile": {"cudagraphs": "off"}},
    "compile-fallback": {"compile": {"fallback": "on"}},
    "compile-off": {"compile": {"enabled": "off"}},
    "debug-guards": {"guards": {"labels": "on", "embeddings": "on"}, "compile": {"enabled": "off"}},
    "tf-hierarchical-copy": {"tensorflow": {"cross_device_ops": "hierarchical-copy"}},
}
OPTIONS = {
    "free-port": ("--master-port=40123",),
    "fresh-rendezvous": ("--rdzv-id=saferun-id", "--master-port=40123"),
}
LIMITS = {
    "more-open-files": {"nofile": 65536},
    "new-session": {"session": "new", "ignore": ("SIGHUP",)},
}


def test_each_mitigation_changes_in_the_plan_what_it_says_and_nothing_else():
    check_cases([(name,) for name in ALL], _changes_what_it_says)


def _changes_what_it_says(name: str) -> None:
    before, after = planned(), planned(name)
    own = {contract.VARIABLE, "SAFERUN_MITIGATIONS"}
    changed = {k: s for k, s in after.env.items() if before.env.get(k) != s and k not in own}
    assert {key: made.value for key, made in changed.items()} == VARIABLES[name]
    for made in changed.values():
        assert (made.origin, made.source) == (f"mitigation {name}", ALL[name].source)
        assert made.why == ALL[name].why
    changed_hooks = before.settings.hooks
    changed_hooks = replace(changed_hooks, HOOKS.get(name, {}))
    assert after.settings.hooks == changed_hooks
    assert after.torchrun_args == (*OPTIONS.get(name, ()), *before.torchrun_args)
    assert after.command[1:] == after.torchrun_args
    assert after.limits == ProcessLimits(**LIMITS.get(name, {}))
    assert after.mitigations == (name,)
    assert contract.decode(after.env[contract.VARIABLE].value)["mitigations"] == [name]


@pytest.mark.parametrize(
    ("name", "hook", "key", "value"),
    [
        (name, hook, key, value)
        for name, tree in HOOKS.items()
        for hook, settings in tree.items()
        for key, value in settings.items()
    ],
)
def test_a_hooks_setting_is_in_force_beneath_any_profile_and_says_where_it_comes_from(
    name, hook, key, value
):
    other = next(choice for choice in KEYS[f"hooks.{hook}.{key}"].choices if choice != value)
    plan = planned(name, leaves={f"hooks.{hook}.{key}": Leaf(other)})
    assert getattr(getattr(plan.settings.hooks, hook), key) == value
    sent = contract.decode(plan.env[contract.VARIABLE].value)["hooks"]
    assert sent[hook][key] == value
    assert plan.notes[f"hooks.{hook}.{key}"].origin == f"mitigation {name}"


def test_a_mitigation_inside_the_ranks_reaches_them_where_no_other_hook_is_on():
    assert contract.VARIABLE not in planned("nccl-p2p-off", leaves=QUIET).env

    def check(name: str) -> None:
        assert contract.VARIABLE in planned(name, leaves=QUIET).env

    check_cases([(name,) for name, made in ALL.items() if made.needs_hooks], check)


def test_a_mitigation_beats_the_profile_the_exported_variable_and_the_set_option():
    name = "NCCL_P2P_DISABLE"
    given_ = Given(f"env.{name}", Leaf("0"), "--set")
    plan = planned("nccl-p2p-off", environ={name: "0"}, leaves={f"env.{name}": Leaf("0")})
    assert (plan.env[name].value, plan.env[name].origin) == ("1", "mitigation nccl-p2p-off")
    plan = planned("nccl-p2p-off", environ={name: "0"}, sets=(given_,))
    assert (plan.env[name].value, plan.env[name].origin) == ("1", "mitigation nccl-p2p-off")


def test_a_list_keeps_the_other_items_and_names_both_origins():
    name = "PYTORCH_CUDA_ALLOC_CONF"
    exported = {name: "max_split_size_mb:64,expandable_segments:False"}
    made = planned("expandable-segments", environ=exported).env[name]
    assert made.value == "max_split_size_mb:64,expandable_segments:True"
    assert made.origin == "exported + mitigation expandable-segments"
    leaves = {f"env.{name}": Leaf("garbage_collection_threshold:0.8")}
    made = planned("split-size", leaves=leaves).env[name]
    assert made.value == "garbage_collection_threshold:0.8,max_split_size_mb:128"
    assert made.origin == "p.yaml + mitigation split-size"


def test_either_name_of_the_allocators_list_gets_the_mitigation():
    other = "PYTORCH_ALLOC_CONF"
    env = planned("expandable-segments", environ={other: "max_split_size_mb:64"}).env
    both = "max_split_size_mb:64,expandable_segments:True"
    assert (env[other].value, env["PYTORCH_CUDA_ALLOC_CONF"].value) == (both, both)


ITEMS = st.sampled_from(["expandable_segments", "max_split_size_mb", "backend", "pinned"])
CONF = st.dictionaries(ITEMS, st.sampled_from(["True", "False", "7"])).map(
    lambda items: ",".join(f"{k}:{v}" for k, v in items.items())
)
NAMES = sorted({name for values in VARIABLES.values() for name in values} | set(OTHER_NAME))


@given(
    st.dictionaries(st.sampled_from(NAMES), CONF),
    st.dictionaries(st.sampled_from(NAMES), CONF),
    st.permutations(sorted(ALL)).map(lambda names: names[:4]),
)
@settings(max_examples=150, deadline=None)
def test_whatever_is_exported_a_mitigations_value_is_in_force_and_other_items_stay(
    env, profile, names
):
    leaves = {f"env.{name}": Leaf(value) for name, value in profile.items()}
    before = planned(environ=env, leaves=leaves)
    after = planned(*names, environ=env, leaves=leaves)
    job = after.environment(env)
    was = before.environment(env)
    wanted = [(k, v) for name in names for k, v in VARIABLES[name].items()]
    for name, value in wanted:
        if name in LISTS:
            between, pair = LISTS[name]
            given_, old = (set(filter(None, e.get(name, "").split(between))) for e in (job, was))
            last = [v for k, v in wanted if k == name]
            assert set(last) <= given_
            touched = {item.split(pair)[0] for item in last}
            assert {i for i in old if i.split(pair)[0] not in touched} <= given_
            assert len({i.split(pair)[0] for i in given_}) == len(given_)
        else:
            assert job[name] == value
    mine = {name for name, _ in wanted} | {OTHER_NAME.get(name) for name, _ in wanted}
    mine |= {contract.VARIABLE, "SAFERUN_MITIGATIONS"}
    assert {k: v for k, v in job.items() if k not in mine} == {
        k: v for k, v in was.items() if k not in mine
    }


def test_several_mitigations_work_together_in_order():
    plan = planned("autotune-off", "cudagraphs-off", "nccl-p2p-off", "new-session")
    assert plan.settings.hooks.compile.autotune == plan.settings.hooks.compile.cudagraphs == "off"
    assert plan.env["NCCL_P2P_DISABLE"].value == "1"
    assert plan.limits.session == "new"


# --- torchrun's options --------------------------------------------------------------------------

ETCD = ("--rdzv-backend=etcd-v2", "--rdzv-endpoint=etcd:2379")
RENDEZVOUS = {
    "default": ((), {}, "--master-port=40123"),
    "master port": (("--master_port", "29500"), {}, "--master-port=40123"),
    "exported port": ((), {"PET_MASTER_PORT": "29500"}, "--master-port=40123"),
    "static endpoint": (("--rdzv-endpoint=h:1",), {}, "--rdzv-endpoint=h:40123"),
    "c10d": (
        ("--rdzv_backend=c10d", "--rdzv_endpoint", "localhost:29500"),
        {},
        "--rdzv-endpoint=localhost:40123",
    ),
    "c10d on IPv6": (
        ("--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:29500"),
        {},
        "--rdzv-endpoint=[::1]:40123",
    ),
    "c10d without an endpoint": (("--rdzv-backend=c10d",), {}, "--rdzv-endpoint=localhost:40123"),
    "c10d without a port": (
        ("--rdzv-backend=c10d", "--rdzv-endpoint=me"),
        {},
        "--rdzv-endpoint=me:40123",
    ),
    "exported c10d": ((), {"PET_RDZV_BACKEND": "c10d"}, "--rdzv-endpoint=localhost:40123"),
    "any port": (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), {}, None),
    "standalone": (("--standalone", "--master-port=29500"), {}, None),
    "etcd": (ETCD, {}, None),
    "file": (
        ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-endpoint=/tmp/f"),
        {},
        None,
    ),
    "several nodes": (("--nnodes=2",), {}, None),
    "elastic": (("--nnodes=1:2",), {}, None),
}


def test_the_option_that_moves_the_port_depends_on_the_rendezvous():
    def check(argv: tuple[str, ...], environ: dict[str, str], option: str | None) -> None:
        at = here(*argv, "t.py", environ=environ)
        assert mitigation_overlay.usable(ALL, "free-port", (), at) is (option is not None)
        if option is not None:
            assert mitigation_overlay.changes(ALL, ["free-port"], at).torchrun == (option,)

    check_cases(RENDEZVOUS, check)


SCRIPTS = [
    ("t.py",),
    ("t.py", "--master-port", "5"),
    ("--", "t.py", "--x"),
    ("t.py", "--", "t.py"),
    ("-m", "pkg.train", "--rdzv-id", "7"),
    ("--master-port", "1", "t.py"),
    ("--master-port=1", "--", "t.py", "--", "-x"),
    ("--master_p", "1", "-t3", "t.py"),
]


@pytest.mark.parametrize("arguments", SCRIPTS, ids=" ".join)
def test_torchruns_own_parser_takes_the_mitigations_option_and_the_same_script(arguments):
    run = pytest.importorskip("torch.distributed.run")
    line = torchrun_args.parse(arguments).line
    plan = planned("free-port", arguments=arguments)
    read = run.get_args_parser().parse_args(list(plan.torchrun_args))
    assert read.master_port == 40123
    assert (read.training_script, tuple(read.training_script_args)) == (
        line.script,
        line.script_args,
    )


LISTEN = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
print(f"met {dist.get_world_size()}")  # at once: torchrun gives ranks -u
dist.destroy_process_group()
"""
TAKEN = {
    "master port": (("--master-port={port}",), {}),
    "c10d": (("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"), {}),
    "exported port": ((), {"PET_MASTER_PORT": "{port}"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "environ"), TAKEN.values(), ids=TAKEN)
def test_a_job_whose_port_is_taken_meets_on_a_free_one(arguments, environ, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "t.py"
    script.write_text(LISTEN)
    with _held_port() as port:
        arguments = [word.format(port=port) for word in arguments]
        arguments = (*arguments, "--nproc-per-node=2", str(script))
        environ = {name: text.format(port=port) for name, text in environ.items()}
        asked = probes.Probes({}, None).ask(["free"], 2)
        ended = {}
        for names in ((), ("free-port",)):
            if not names and "c10d" in arguments:
                continue  # torchrun takes 60 s to see it
            plan = planned(
                *names, arguments=arguments, environ=environ, leaves=QUIET, answers=asked
            )
            kept = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "SAFERUN_"))}
            env = plan.environment({**kept, **environ, "OMP_NUM_THREADS": "1"})
            done = subprocess.run(
                plan.command, env=env, cwd=tmp_path, capture_output=True, text=True
            )
            ended[names] = (done.returncode, done.stdout.count("met 2"), done.stderr)
    if () in ended:
        assert ended[()][0] != 0
        assert "EADDRINUSE" in ended[()][2]
    assert ended[("free-port",)][:2] == (0, 2), ended[("free-port",)]


@contextlib.contextmanager
def _held_port():
    with socket.socket(socket.AF_INET6) as holder:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("::", 0))
        holder.listen()
        yield holder.getsockname()[1]


# --- whether it can be used ----------------------------------------------------------------------

GRAPHS = {"graphs_seen": True}


def test_every_mitigation_can_be_used_in_a_plain_job_and_only_once():
    def check(name: str) -> None:
        assert mitigation_overlay.refusal(ALL, name, (), here()) == ""
        assert mitigation_overlay.refusal(ALL, name, (name,), here()) == "it is in force already"

    check_cases([(name,) for name, made in ALL.items() if not made.last], check)


@pytest.mark.parametrize(
    ("name", "in_force", "at", "why"),
    [
        ("no-such", (), here(), "no such mitigation"),
        ("debug-settings", (), here(), "only collects diagnostics"),
        ("debug-guards", (), here(), "only collects diagnostics"),
        ("expandable-segments", (), here(**GRAPHS), "CUDA graphs"),
        ("expandable-segments", (), here(environ={"TORCHINDUCTOR_CUDAGRAPHS": "1"}), "CUDA graphs"),
        ("split-size", ("expandable-segments",), here(), "together with expandable-segments"),
        ("autotune-off", ("compile-off",), here(), "together with compile-off"),
        ("autotune-off", (), here(hooks_run=False), "skip the hooks"),
        ("ddp-optimizer-off", (), here(hooks_run=False), "skip the hooks"),
        ("newer-ptxas", (), here(answers={}), "no value for: newest-ptxas"),
        ("more-open-files", (), here(answers={}), "no value for: open-files"),
        ("free-port", (), here(leaves={"launcher": Leaf("python")}), "no torchrun"),
        ("free-port", (), here("--nnodes=2", "t.py"), "one node cannot"),
        ("fresh-rendezvous", (), here("--nnodes=2", "t.py"), "one node cannot"),
        ("nccl-p2p-off", (), here(environ={"NCCL_P2P_DISABLE": "1"}), "change nothing"),
        ("nvls-off", (), here(leaves={"env.NCCL_NVLS_ENABLE": Leaf("0")}), "change nothing"),
        ("autotune-off", (), here(leaves={"hooks.compile.autotune": Leaf("off")}), "nothing"),
        ("free-port", ("fresh-rendezvous",), here(), "change nothing"),
    ],
)
def test_a_mitigation_that_cannot_help_here_is_refused_with_the_reason(name, in_force, at, why):
    assert why in mitigation_overlay.refusal(ALL, name, in_force, at)
    assert not mitigation_overlay.usable(ALL, name, in_force, at)


@pytest.mark.parametrize(
    ("in_force", "leaves"),
    [
        (("cudagraphs-off",), {}),
        (("compile-off",), {}),
        ((), {"hooks.compile.cudagraphs": Leaf("off")}),
        ((), {"hooks.compile.enabled": Leaf("off")}),
    ],
    ids=["mitigation", "not compiled", "profile", "profile without compilation"],
)
def test_expandable_segments_may_be_used_once_graphs_are_off(in_force, leaves):
    assert mitigation_overlay.usable(
        ALL, "expandable-segments", in_force, here(leaves=leaves, **GRAPHS)
    )


@pytest.mark.parametrize(
    ("torch", "fits"), [("2.7.1", False), ("2.8.0+cu128", True), ("2.10.0", False), (None, False)]
)
def test_a_mitigation_for_some_versions_is_for_those_only_and_for_no_unknown_one(torch, fits):
    body = {"cost": "c", "why": "w", "source": "s", "env": {"A": "1"}, "torch": ">=2.8,<2.10"}
    assert (
        mitigation_overlay.usable(mitigation_catalog.parse({"a": body}), "a", (), here(torch=torch))
        is fits
    )


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({"effective": {"triton.cudagraphs": True}}, True),
        ({"graphs": True}, True),
        ({"effective": {"triton.cudagraphs": False}}, False),
        ({"effective": "?"}, False),
        ({}, False),
    ],
)
def test_receipts_tell_whether_graphs_were_used(facts, seen):
    assert mitigation_overlay.graphs_seen([{}, facts]) is seen


# --- description for people ----------------------------------------------------------------------


def test_a_mitigation_is_described_with_what_it_sets_and_costs():
    def check(name: str) -> None:
        text = mitigation_catalog.describe(ALL, [name])
        assert text.startswith(f"{name} (")
        assert "; cost: " in text
        assert "()" not in text
        assert "\n" not in text

    check_cases([(name,) for name in ALL], check)


def test_a_measured_cost_is_described_as_a_share_of_the_throughput():
    described = "compile-off (compile.enabled=off; cost: 32 % of the throughput)"
    assert mitigation_catalog.describe(ALL, ["compile-off"]) == described


# --- what the probes find ------------------------------------------------------------------------


def test_every_attempt_gets_a_port_of_its_own(monkeypatch):
    ports = iter(["1", "2", "3"])
    monkeypatch.setattr(probes, "free_port", lambda: next(ports))
    asked = probes.Probes({}, None)
    assert [asked.ask(["free"], attempt)["free"] for attempt in (2, 2, 3)] == ["1", "1", "2"]


def test_a_port_and_an_id_are_fresh_for_each_attempt_and_stay_for_it():
    asked = probes.Probes({}, None)
    first = asked.ask(["free", "fresh"], 2)
    assert first == asked.ask(["free", "fresh"], 2)
    assert first["fresh"] != asked.ask(["fresh"], 3)["fresh"]
    with socket.socket(socket.AF_INET6) as trial:
        trial.bind(("::", int(first["free"])))


def test_the_cache_directory_is_private_stays_for_the_run_and_goes_with_it(tmp_path):
    asked = probes.Probes({"TMPDIR": str(tmp_path)}, None)
    made = asked.ask(["fresh-directory"], 2)["fresh-directory"]
    assert asked.ask(["fresh-directory"], 3)["fresh-directory"] == made
    assert Path(made).parent == tmp_path
    assert stat.S_IMODE(os.stat(made).st_mode) == 0o700
    (Path(made) / "rank0").mkdir()
    asked.close()
    assert not os.path.exists(made)
    asked.close()


def test_without_a_usable_temporary_directory_the_runs_own_is_taken(tmp_path):
    asked = probes.Probes({"TMPDIR": "/proc/nowhere"}, None, str(tmp_path))
    made = asked.ask(["fresh-directory"], 1)["fresh-directory"]
    assert Path(made).parent == tmp_path
    asked.close()
    nowhere = probes.Probes({"TMPDIR": "/proc/nowhere"}, None, "/proc/nowhere")
    assert nowhere.ask(["fresh-directory"], 1) == {}


def _ptxas(path: Path, release: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.9'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("packaged", "toolkits", "chosen"),
    [
        (["12.8"], ["13.0"], 0),
        (["12.8"], ["12.9", "13.1", "13.0"], 1),
        (["12.8"], ["12.8"], None),
        (["12.8", "13.1"], ["13.0"], None),
        (["12.8"], [], None),
        ([], ["13.0"], None),
        (["9.2"], ["12.1"], 0),
    ],
    ids=["newer", "newest", "same", "older than one", "no toolkit", "no triton", "by number"],
)
def test_the_newest_ptxas_is_taken_where_it_is_newer_than_the_packaged(
    packaged, toolkits, chosen, tmp_path, monkeypatch
):
    monkeypatch.setattr(probes, "TOOLKITS", str(tmp_path / "none*"))
    folder = tmp_path / "venv/lib/python3.11/site-packages/triton/backends/nvidia/bin"
    for name, release in zip(["ptxas", "ptxas-blackwell"], packaged, strict=False):
        _ptxas(folder / name, release)
    found = [_ptxas(tmp_path / f"cuda{i}/bin/ptxas", r) for i, r in enumerate(toolkits)]
    environ = {"PATH": ":".join(str(Path(path).parent) for path in found)}
    newest = probes.newest_ptxas(environ, str(tmp_path / "venv"))
    assert newest == (None if chosen is None else found[chosen])


@pytest.mark.parametrize("text", ["exit 3", "echo nothing", "sleep 0; exit 0"])
def test_a_ptxas_that_says_nothing_has_no_version(text, tmp_path):
    path = tmp_path / "ptxas"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    assert probes.ptxas_version(str(path)) == ()
    assert probes.ptxas_version(str(tmp_path / "none")) == ()


def test_open_files_are_answered_only_where_the_limit_can_be_raised(monkeypatch):
    import resource

    for limits, answer in [((1024, 4096), "4096"), ((4096, 4096), None), ((-1, -1), None)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert probes.open_files() == answer
    plan = planned("more-open-files", answers={"open-files": "4096"})
    assert plan.limits == ProcessLimits(nofile=4096)


def test_the_interface_is_a_real_one_and_not_the_loopback_where_there_are_several_nodes():
    names = {name for _, name in socket.if_nameindex()}
    alone = probes.reachable_interface("", 1)
    assert alone in names
    assert probes.reachable_interface("127.0.0.1", 2) != "lo"
    assert probes.reachable_interface("no.such.host.invalid", 2) in {*names, None}
