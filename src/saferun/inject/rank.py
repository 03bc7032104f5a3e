"""Find out which rank this process is, and whether it is a rank at all."""

import os
import sys

from . import contract

C10D = "torch.distributed.distributed_c10d"


def is_rank_process() -> bool:
    """Return whether the launcher started this very process as a rank; a rank's helper is none."""
    return os.environ.get(contract.RANK_MARK) == str(os.getpid()) and "RANK" in os.environ


def is_started_by_launcher() -> bool:
    """Return whether the launcher started this very process, as a rank or as plain python."""
    main = os.environ.get(contract.MAIN_MARK, "")
    return is_rank_process() or main.startswith(f"{os.getpid()} ")


def number() -> "int | None":
    """Return this process's global rank: from its group, else from RANK, else None."""
    if group_is_initialised():
        rank: int = sys.modules[C10D].get_rank()
        return rank
    return variable("RANK")


def variable(name: str) -> "int | None":
    """Return the number in an environment variable; None if it has none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def group_is_initialised() -> bool:
    """Return whether this process has joined a process group. Never raises."""
    c10d = sys.modules.get(C10D)
    initialised = getattr(c10d, "is_initialized", None)  # absent while the module is being executed
    try:
        return bool(initialised and initialised())
    except Exception:
        return False


def is_distributed() -> bool:
    """Return whether this process has joined a process group, or is one of several that will."""
    size = variable("WORLD_SIZE")
    return group_is_initialised() or ("RANK" in os.environ and size is not None and size > 1)
