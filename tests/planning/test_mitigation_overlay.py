"""A mitigation changes the next attempt's plan, overrides everything else and names itself."""

import pytest
from cases import check_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from mitigation_plans import ALL, QUIET, planned

from saferun.inject import contract
from saferun.knowledge.variable_names import LISTS, OTHER_NAME
from saferun.model import ProcessLimits, as_tree
from saferun.profile.merge import Given
from saferun.profile.schema import Leaf
from saferun.settings import KEYS, leaves, with_values

# The probes' answers are those of `mitigation_plans`.
COMPUTED = {
    "fresh-compile-cache": {
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/fresh",
        "TRITON_CACHE_DIR": "/tmp/fresh",
    },
    "newer-ptxas": {
        "TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas",
        "TRITON_PTXAS_BLACKWELL_PATH": "/usr/local/cuda/bin/ptxas",
    },
    "nccl-socket-interface": {"NCCL_SOCKET_IFNAME": "=eth7"},
    "gloo-socket-interface": {"GLOO_SOCKET_IFNAME": "eth7"},
}
VARIABLES = {name: {**made.env, **COMPUTED.get(name, {})} for name, made in ALL.items()}
OPTIONS = {
    "free-port": ("--master-port=40123",),
    "fresh-rendezvous": ("--rdzv-id=saferun-id", "--master-port=40123"),
}
LIMITS = {
    "more-open-files": {"nofile": 65536},
    "more-processes": {"nproc": 65536},
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
    hooks = with_values(before.settings.hooks, ALL[name].settings, "hooks.")
    assert after.settings.hooks == hooks
    assert after.torchrun_args == (*OPTIONS.get(name, ()), *before.torchrun_args)
    assert after.command[1:] == after.torchrun_args
    assert after.limits == ProcessLimits(**LIMITS.get(name, {}))
    assert after.mitigations == (name,)
    assert contract.decode(after.env[contract.VARIABLE].value)["mitigations"] == [name]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [(name, key, value) for name, made in ALL.items() for key, value in made.settings.items()],
)
def test_a_hooks_setting_is_in_force_beneath_any_profile_and_says_where_it_comes_from(
    name, key, value
):
    other = next(choice for choice in KEYS[key].choices if choice != value)
    plan = planned(name, leaves={key: Leaf(other)})
    assert {name: value for name, _, value in leaves(plan.settings)}[key] == value
    sent = contract.decode(plan.env[contract.VARIABLE].value)["hooks"]
    assert sent == as_tree(plan.settings.hooks)
    assert plan.notes[key].origin == f"mitigation {name}"


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
