"""What the call of init_process_group and torchrun's variables say about the group."""

import pytest

from saferun.inject.hooks import environment
from saferun.inject.hooks.init import hook


class Cuda:
    """torch.cuda as the decision sees it; asking it when there is no need fails."""

    def __init__(self, count: int = 4, *, available: bool = True, initialized: bool = False):
        self.count, self.available, self.initialized = count, available, initialized

    def is_initialized(self) -> bool:
        return self.initialized

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return self.count


DEVICES = {
    "nccl": ("nccl", "3", Cuda(), 3),
    "both": ("cpu:gloo,cuda:nccl", "1", Cuda(), 1),
    "no-backend": ("undefined", "1", Cuda(), 1),
    "no-backend-no-gpu": ("undefined", "1", Cuda(available=False), None),
    "gloo-never-asks-cuda": ("gloo", "1", None, None),
    "more-ranks-than-devices": ("nccl", "4", Cuda(), None),
    "one-visible-device-each": ("nccl", "1", Cuda(1), None),
    "context-exists": ("nccl", "1", Cuda(initialized=True), None),
    "no-local-rank": ("nccl", None, None, None),
    "odd-local-rank": ("nccl", "x", None, None),
}


@pytest.mark.parametrize(("backend", "local_rank", "cuda", "index"), DEVICES.values(), ids=DEVICES)
def test_the_device_is_set_only_where_it_is_certain(backend, local_rank, cuda, index):
    assert hook.device_to_set(backend, local_rank, cuda) == index


ENV = {"RANK": "1", "WORLD_SIZE": "4"}


CALLS = {
    "env": ({}, ENV, (1, 4)),
    "the-same-said": ({"init_method": "env://", "rank": 1, "world_size": 4}, ENV, (1, 4)),
    "half-said": ({"rank": -1, "world_size": 4}, ENV, (1, 4)),
    "other-size": ({"world_size": 2}, ENV, None),
    "other-rank": ({"rank": 0}, ENV, (1, 4)),
    "tcp": ({"init_method": "tcp://h:1"}, ENV, None),
    "query": ({"init_method": "env://?rank=1"}, ENV, None),
    "store": ({"store": object()}, ENV, None),
    "no-size": ({}, {"RANK": "1"}, None),
    "no-number": ({}, {"RANK": "one", "WORLD_SIZE": "4"}, None),
}


@pytest.mark.parametrize(("arguments", "environ", "world"), CALLS.values(), ids=CALLS)
def test_only_the_environments_world_checks_in_before(arguments, environ, world):
    assert environment.world_of(arguments, environ) == world


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("more", "shared"),
    [
        ({}, True),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, False),
        ({"MASTER_PORT": ""}, False),
        ({"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "0"}, True),
        ({"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
    ],
    ids=["agent", "rank-0-hosts", "no-port", "nodes", "nodes-restarting", "node-restarting"],
)
def test_nodes_that_count_restarts_apart_do_not_meet_in_the_agents_store(more, shared):
    assert environment.shares_agent_store({**AGENT, **more}) is shared


def test_a_restart_in_the_same_agent_uses_other_keys():
    """The agent's store outlives the ranks: a meeting must not read the keys of an earlier one."""
    first = hook.agent_prefix("check-in", {"TORCHELASTIC_RESTART_COUNT": "0"})
    assert hook.agent_prefix("check-in", {"TORCHELASTIC_RESTART_COUNT": "1"}) != first
    assert hook.agent_prefix("barrier", {"TORCHELASTIC_RESTART_COUNT": "0"}) != first
