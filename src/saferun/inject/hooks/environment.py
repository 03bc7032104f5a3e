"""Pure: facts about the group in the call of `init_process_group` and torchrun's variables."""

from __future__ import annotations

from collections.abc import Mapping

World = tuple[int, int]  # this process's rank, and the number of ranks


def world_of(arguments: Mapping[str, object], environ: Mapping[str, str]) -> World | None:
    """Return the environment's (rank, size); None if the group is not that world.

    A script may renumber the ranks (`rank=`). Before the group exists all ranks use the
    environment's numbers: otherwise ranks whose two numbers are equal would wait for the others.

    Args:
        arguments: the arguments of `init_process_group`, by name.
        environ: the variables of torchrun.
    """
    if arguments.get("store") is not None or arguments.get("init_method") not in (None, "env://"):
        return None
    try:
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None
    if arguments.get("world_size", -1) not in (-1, size) or not 0 <= rank < size:
        return None
    return rank, size


def uses_agent_store(environ: Mapping[str, str]) -> bool:
    """Return whether the ranks use the agent's store, which outlives them."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def is_one_node(environ: Mapping[str, str]) -> bool:
    """Return whether all ranks of the job run under one agent."""
    return environ.get("GROUP_WORLD_SIZE", "1") == "1"


def shares_agent_store(environ: Mapping[str, str]) -> bool:
    """Return whether all ranks of this attempt find the agent's store under the same prefix.

    Each agent has its own restart count: after a failure on one node the nodes' counts differ
    (elastic/agent/server/api.py), so with restarts only the ranks of a single node can meet there.
    """
    if not uses_agent_store(environ):
        return False
    if not (environ.get("MASTER_ADDR") and environ.get("MASTER_PORT")):
        return False
    return is_one_node(environ) or environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0"


def inits_lazily(environ: Mapping[str, str]) -> bool:
    """Return whether the script wants an init that returns before the other ranks come."""
    return environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")
