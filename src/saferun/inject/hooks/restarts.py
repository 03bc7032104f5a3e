"""Give a restarted rank its own keys in the agent's store, separate from the last restart's.

Target: torch.distributed.rendezvous._create_c10d_store, torch >= 2.4.
Reason: the agent's store survives torchrun's own restarts (--max-restarts), and restarted ranks
read the addresses and the NCCL id of dead ranks: they hang, or fail a minute later
(https://github.com/pytorch/pytorch/issues/135712). TORCH_DISABLE_SHARE_RDZV_TCP_STORE, which
saferun sets, makes the ranks use another store, but only the dynamic rendezvous reads it: a static
one (--master-port, the default before torch 2.13) always shares its store. Seen with NCCL on two
H200s, torch 2.11.
Delete when torch itself adds a prefix for each restart.

It applies only on one node: each agent has its own restart count, so nodes would not find each
other.
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
    """Give a restarted rank's store a prefix; the store of a first start stays unchanged.

    Args:
        name: "torch.distributed.rendezvous".
        module: that module.
        context: the process's context.
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
