"""Give a restarted rank its own keys in the agent's store, apart from those of the last restart.

Target: torch.distributed.rendezvous._create_c10d_store, torch >= 2.4.
Reason: with torchrun's own restarts (--max-restarts) the agent's store lives on, and restarted
ranks read the addresses and the NCCL id of ranks that are dead: they hang, or fail a minute later
(https://github.com/pytorch/pytorch/issues/135712). TORCH_DISABLE_SHARE_RDZV_TCP_STORE, which
saferun sets, has the ranks use another store, but only the dynamic rendezvous reads it: a static
one (--master-port, the default before torch 2.13) shares its store whatever is set. Seen with NCCL
on two H200s, torch 2.11.
Delete when torch puts a prefix for each restart there itself.

Only on one node: restart counts are each agent's own, so nodes would not find each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import contract, hidden_frames
from ..context import Context
from . import environment


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Give the store of a restarted rank a prefix; that of a first start is left as it is.

    Args:
        name: "torch.distributed.rendezvous".
        module: that module.
        context: the process's.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not hasattr(module, "_create_c10d_store") or count in ("", "0"):
        return

    @hidden_frames.replace(module, "_create_c10d_store")
    def create(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        store = original(*args, **kwargs)
        try:
            if not (
                environment.uses_agent_store(os.environ) and environment.is_one_node(os.environ)
            ):
                return store
            import torch._C._distributed_c10d as stores

            own = stores.PrefixStore("saferun/restart/" + count, store)
            context.receipt("restarts", contract.APPLIED, restart=count)
        except Exception as error:
            context.failed("restarts", error)
            return store
        return own
