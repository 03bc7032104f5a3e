"""The two mitigations of compilation that no variable or profile setting can make.

`fresh-compile-cache` sets a cache directory for each rank in os.environ after the import of torch.
`ddp-optimizer-off` changes torch._dynamo.convert_frame, whatever the script assigns. torch 2.4 to
2.13.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ... import contract, hidden_frames, imported_modules
from ...context import Context

_HOOK = "compile"
_DDP_OPTIMIZER_OFF = "ddp-optimizer-off"
_FRESH_CACHE = "fresh-compile-cache"
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def give_rank_own_caches(context: Context) -> None:
    """Give this rank its own compile caches below the directories that the launcher made.

    The launcher does not know the ranks, so the rank does it. A rank's helper inherits the
    directory.
    """
    rank = os.environ.get("RANK", "")
    if _FRESH_CACHE not in context.mitigations or not rank.isdigit():
        return
    own = {}
    for variable, part in _CACHES.items():
        base = os.environ.get(variable, "")
        tail = os.path.join("rank" + rank, part)
        if base and not base.endswith(os.sep + tail):
            own[variable] = os.path.join(base, tail)
    for path in own.values():
        for folder in (os.path.dirname(path), path):  # the mode applies only to the last folder
            os.makedirs(folder, mode=0o700, exist_ok=True)
    os.environ.update(own)
    if imported_modules.born:  # otherwise the next start takes these for the program's assignments
        imported_modules.born.update(own)
    if own:
        context.receipt(_HOOK, contract.APPLIED, part="caches", effective=own)


def switch_ddp_optimizer_off(module: ModuleType, context: Context) -> None:
    """Keep the graph whole that DDP would split at its buckets, whatever the script assigns.

    Dynamo reads the setting in CatchErrorsWrapper.__call__, for every frame. The mode
    "python_reducer" is a different mechanism, which DDP has already set up, and it stays.
    """
    if _DDP_OPTIMIZER_OFF not in context.mitigations:
        return
    wrapper = getattr(module, "CatchErrorsWrapper", None)
    if wrapper is None:
        context.receipt(_HOOK, contract.NOT_NEEDED, part="ddp optimizer", why="none in this torch")
        return
    config = module.config

    @hidden_frames.replace(wrapper, "__call__")
    def catch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if config.optimize_ddp in (True, "ddp_optimizer"):
            config.optimize_ddp = False
            context.activate()
            effective = {"optimize_ddp": config.optimize_ddp}
            context.receipt(_HOOK, contract.OBSERVED, part="ddp optimizer", effective=effective)
        return original(self, *args, **kwargs)

    context.receipt(_HOOK, contract.APPLIED, part="ddp optimizer")
