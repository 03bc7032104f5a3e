"""Choose the receivers of SIGUSR1 and SIGUSR2: only ranks that have a use for them.

torchrun dies of them or ends the job (`--signals-to-handle`), and a rank's helpers, which torchrun
signals together with the rank, die of them. This module uses only the standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from saferun.base import proc
from saferun.keeper import process_tree


def receivers(
    command: int, living: Mapping[int, int], joined: Collection[int], number: int
) -> list[int]:
    """Return the pids that get a signal: the ranks', or the command's if no rank is known.

    A process that would die of it does not get it.

    Args:
        command: the attempt's first process.
        living: {pid: start time} of all processes of the attempt.
        joined: pids that have left a rank's receipt; other processes may have these pids by now.
        number: the signal's number.
    """
    ranks = {pid for pid in joined if pid in living}
    above = {parent for pid in ranks for parent in _ancestors(pid, living)}
    ranks.update(pid for pid in _launched(command, living) if pid not in above)
    known = [pid for pid in ranks or {command} if pid in living]
    return [pid for pid in known if process_tree.catches(pid, number, or_blocks=True)]


def _launched(command: int, living: Mapping[int, int]) -> list[int]:
    """Return the processes that a launcher started as ranks; a rank's own children do not count."""
    parents = {pid: stat[0] for pid in living if (stat := process_tree.read_stat(pid))}
    if "RANK" in proc.environ(command):  # it runs inside a rank: all its children have it
        return [pid for pid, parent in parents.items() if parent == command]
    ranked = {pid for pid in parents if "RANK" in proc.environ(pid)}
    return [pid for pid in ranked if parents[pid] not in ranked]


def _ancestors(pid: int, living: Mapping[int, int]) -> list[int]:
    found: list[int] = []
    while (stat := process_tree.read_stat(pid)) and stat[0] in living and stat[0] not in found:
        pid = stat[0]
        found.append(pid)
    return found
