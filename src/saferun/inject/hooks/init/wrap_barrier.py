"""A bounded barrier after DDP or FSDP has wrapped a model.

Reason: ranks that wrap minutes apart run into the time-out of the first collective.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ....base import durations
from ....base.rank_numbers import ranks_text
from ... import meeting, rank
from ...context import Context
from . import hook

TIMEOUT_S = 60.0  # ranks make the same model seconds apart; after more, a rank wraps none
LIMIT = 8  # most barriers of one group; a model with hundreds of wrapped blocks needs no more


class WrapBarrier:
    """The barriers of this process; after a timeout there are no more."""

    def __init__(self, enabled: bool, context: Context) -> None:
        self._enabled = enabled  # hooks.order.wrap_barrier
        self._context = context
        self._counts: dict[str, int] = {}  # group name -> barriers so far
        self._gave_up = False

    def wait(self, group: Any, *, reports: bool = True) -> None:
        """Wait for the ranks of exactly this group; if `reports`, name those that do not come."""
        c10d = sys.modules.get(rank.C10D)
        if not self._enabled or self._gave_up or group is None or c10d is None:
            return
        if group.size() < 2 or not _is_real(c10d, group):
            return
        name = c10d._get_process_group_name(group)
        count = self._counts[name] = self._counts.get(name, 0) + 1
        if count > LIMIT:
            return
        own = meeting.own_connection(c10d._get_process_group_store(group))
        store = c10d.PrefixStore(f"saferun/wrap/{count}", own)
        ours, size = group.rank(), group.size()
        reporter, missing = meeting.meet(store, ours, size, {}, min, TIMEOUT_S)
        if not missing:
            meeting.leave(store, size, stays=ours == 0)
            return
        self._gave_up = True
        if reports and ours == reporter:
            absent = ranks_text([c10d.get_global_rank(group, one) for one in missing])
            self._context.say(
                f"{absent} did not wrap the model within {durations.seconds(TIMEOUT_S)};"
                " the job goes on, without such barriers"
            )


def group_of_mesh(kwargs: Mapping[str, Any]) -> Any:
    """Return the group of a one-dimensional mesh; without a mesh the default group; else None.

    Args:
        kwargs: the keyword arguments of `fully_shard`.
    """
    if kwargs.get("dp_mesh_dims") is not None:
        return None
    mesh = kwargs.get("mesh")
    if mesh is None:
        return sys.modules[rank.C10D].GroupMember.WORLD
    return mesh.get_group() if mesh.ndim == 1 else None


def _is_real(c10d: ModuleType, group: Any) -> bool:
    known = c10d._world.pg_map.get(group)  # it lacks a group that the script itself made
    return hook.is_real(str(known[0] if known else ""))
