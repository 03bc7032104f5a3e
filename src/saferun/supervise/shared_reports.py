"""What the nodes of a run tell each other through a directory that all of them see.

Each node that keeps a journal makes a directory in it with a word of its own. Node 0's is used: its
path and word come to the others by the agents' meeting, and a node that finds the word there shares
the directory. After a failure each node puts its report there under a name of its own, in one step,
and waits for those of the others, so that all decide at once and nobody has to start an agent to
tell the others of its end. No file has two writers, hence there is no lock. Without such a
directory the reports travel by the next meeting alone (inject/node_agent.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection

from saferun.system import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.inject.nodes import Report

WAIT_S = 15.0  # an agent is told of another's failure within 6 s, and its ranks end
_LOOK_S = 0.1  # a look is some reads over the network, and the next attempt waits for the last one
_DIRECTORY, _WORD = "nodes", "word"


def offer(run_path: str | None) -> str:
    """Make the directory of this node's run; return its place and word as text, "" for none.

    Args:
        run_path: the run's directory; None where there is none.
    """
    if run_path is None:
        return ""
    place, word = os.path.join(run_path, _DIRECTORY), os.urandom(16).hex()
    try:
        os.mkdir(place, 0o700)
    except OSError:
        return ""
    return json.dumps([place, word]) if _put(os.path.join(place, _WORD), word.encode()) else ""


def exchange(shared: str, report: Report, expected: Collection[str]) -> list[Report]:
    """Leave a report and wait for those of the other nodes.

    Args:
        shared: what node 0 offered.
        report: of this node.
        expected: the ranks of all nodes.

    Returns:
        The reports of all nodes; none of them where one did not come in time, or where the
        directory is not shared.
    """
    place = _place(shared)
    if not place or not _put(_path(place, report["attempt"], str(report["node"])), _text(report)):
        return []
    limit = time.monotonic() + WAIT_S
    while not (found := read(shared, report["attempt"], expected)) and time.monotonic() < limit:
        time.sleep(_LOOK_S)
    return found


def read(shared: str, attempt: int, expected: Collection[str]) -> list[Report]:
    """Return the reports of all nodes of an attempt, none of them where one is missing.

    Args:
        shared: what node 0 offered.
        attempt: its number.
        expected: the ranks of all nodes.
    """
    place = _place(shared)
    if not place:
        return []
    contents = [paths.read_private(_path(place, attempt, node)) for node in expected]
    try:
        return [json.loads(content) for content in contents if content is not None] * (
            None not in contents
        )
    except ValueError:
        return []


def _place(shared: str) -> str:
    """Return the directory that was offered, where this node sees it; else ""."""
    if not shared:
        return ""
    place, word = json.loads(shared)
    return place if paths.read_private(os.path.join(place, _WORD)) == word.encode() else ""


def _path(place: str, attempt: int, node: str) -> str:
    return os.path.join(place, f"a{attempt}-{node}.json")


def _text(report: Report) -> bytes:
    return json.dumps(report).encode()


def _put(path: str, content: bytes) -> bool:
    """Write a file of ours in one step; return whether it is there."""
    return paths.write_private(path, content)
