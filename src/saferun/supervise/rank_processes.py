"""Find the ranks that a launcher has started, from /proc and the RANK of its children."""

from __future__ import annotations

import os

from saferun.base import proc


def rank_of(pid: int) -> int | None:
    """Return the RANK with which a process was started; None without one."""
    rank = proc.environ(pid).get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def ranks(launcher: int) -> dict[int, int]:
    """Return the pids of the ranks that a launcher has started, by rank.

    A launcher with RANK in its own environment starts no ranks: its children inherit the variable.
    """
    children = proc.text(f"/proc/{launcher}/task/{launcher}/children").split()
    found = {rank_of(pid): pid for pid in map(int, children)} if rank_of(launcher) is None else {}
    return {rank: pid for rank, pid in found.items() if rank is not None}


def is_isolated(pid: int) -> bool:
    """Return whether a process is a Python with -I, -E or -S, which skips our sitecustomize."""
    program, *arguments = proc.command(pid) or [""]
    if "python" not in os.path.basename(program):
        return False
    for argument in arguments:
        if not argument.startswith("-") or argument.startswith("--"):
            return False
        for letter in argument[1:]:
            if letter in "IES":
                return True
            if letter in "mcWX":  # the rest, or the next argument, is this option's value
                return False
    return False
