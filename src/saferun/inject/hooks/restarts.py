"""A restarted rank finds a room of its own in the agent's store, not the last life's keys.

Target: torch.distributed.rendezvous._create_c10d_store, torch >= 2.4.
Reason: with torchrun's own restarts (--max-restarts) the agent's store lives on, and restarted
ranks meet the addresses and the NCCL id of ranks that are dead: they hang, or fail a minute later
(https://github.com/pytorch/pytorch/issues/135712). TORCH_DISABLE_SHARE_RDZV_TCP_STORE, which
saferun sets, has the ranks use another store, but only the dynamic rendezvous reads it: a static
one (--master-port, the default before torch 2.13) shares its store whatever is set. Seen with NCCL
on two H200s, torch 2.11.
Delete it when torch puts a prefix for each restart there itself.

Only on one node: restart counts are each agent's own, so nodes would not find each other.
"""

import os

from _saferun_inject import contract


def apply(name, module, context):
    """Give the store of a restarted rank a prefix; the first life's is left as it is."""
    original = getattr(module, "_create_c10d_store", None)
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if original is None or count in ("", "0"):
        return

    def create(*args, **kwargs):
        store = original(*args, **kwargs)
        try:
            if not shares_agent_store(os.environ):
                return store
            import torch._C._distributed_c10d as stores

            own = stores.PrefixStore("saferun/restart/" + count, store)
            context.receipt("restarts", contract.APPLIED, restart=count)
        except Exception as error:
            context.failed("restarts", error)
            return store
        return own

    module._create_c10d_store = create


def shares_agent_store(environ):
    """Tell whether the group's store is the agent's, which has seen this node's earlier ranks."""
    one_node = environ.get("GROUP_WORLD_SIZE", "1") == "1"
    return one_node and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
