"""Exchange the reports of a run's nodes through a directory that all of them see.

Each node with a journal makes a directory in it with a random word, and brings path and word to the
agents' meeting. If the node that compares them finds all words, all nodes use node 0's directory.

After a failure each node writes its report there atomically, under its own name. The lowest
remaining node reads them all and writes the root's report as the result. The others wait for that
file, so that all decide at the same time and no node has to start an agent to tell the others of
its end. A thousand nodes then read two thousand files instead of a million. If the lowest node does
not come, the next ones read, too; the first result stands, so no lock is needed.

A file is opened only if a listing shows it: an NFS client remembers for up to a minute that a file
does not exist, and a listing makes it ask the server
(https://github.com/PrimeIntellect-ai/prime-rl/pull/3026). Results have their own directory, since
all nodes list it. Without a shared directory the reports are exchanged only at the next meeting
(inject/node/node_agent.py).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection

from saferun.base import files, untrusted
from saferun.inject.node import node_agreement, node_joining, node_watch
from saferun.inject.node.node_agreement import NodeReport
from saferun.system import paths

# The wait for reports is this long plus one heartbeat, by which an agent learns of another node's
# failure: then its own ranks still have to end.
WAIT_S = 15.0
_NEXT_S = 3.0  # extra wait of each next node before it reads the reports, too
# Seconds between two looks, first and later: a look reads several files over the network, and the
# next attempt waits for the last look.
_LOOK_S, _SELDOM_S = 0.1, 1.0
_DIRECTORY, _RESULTS = "nodes", "results"


def offer(run_path: str | None) -> str:
    """Make this node's directory for the run; return its path and word as text, "" if none.

    Args:
        run_path: the run's directory; None if there is none.
    """
    if run_path is None:
        return ""
    place, word = os.path.join(run_path, _DIRECTORY), os.urandom(16).hex()
    try:
        os.mkdir(place, 0o700)
        os.mkdir(os.path.join(place, _RESULTS), 0o700)
    except OSError:
        return ""
    written = paths.write_private(os.path.join(place, node_joining.WORD_FILE), word.encode())
    return json.dumps([place, word]) if written else ""


def exchange(shared: str, report: NodeReport, expected: Collection[str]) -> NodeReport | None:
    """Write a report and wait for those of the other nodes.

    Args:
        shared: the directory that node 0 offered.
        report: this node's report.
        expected: the ranks of all nodes.

    Returns:
        The report of the node where the failure began; None if a report is missing after the wait,
        or if the directory is not shared.
    """
    place, node = _place(shared), str(report["node"])
    if not place:
        return None
    own = _path(place, report["attempt"], node)
    if not paths.write_private(own, json.dumps(report).encode()):
        return None
    waiting = _Reports(place, report["attempt"], expected)
    turn_s = sum(int(other) < int(node) for other in expected) * _NEXT_S
    began = time.monotonic()
    limit_s = WAIT_S + node_watch.every_s(len(expected))
    while (waited_s := time.monotonic() - began) < limit_s:
        if root := waiting.result() or (waiting.gathered(node) if waited_s >= turn_s else None):
            return root
        time.sleep(min(_SELDOM_S, _LOOK_S + waited_s / 20))
    return waiting.result()


def read(shared: str, attempt: int, expected: Collection[str]) -> NodeReport | None:
    """Return the report of the node where an attempt failed; None if a report is missing.

    Args:
        shared: the directory that node 0 offered.
        attempt: the attempt's number.
        expected: the ranks of all nodes.
    """
    place = _place(shared)
    waiting = _Reports(place, attempt, expected)
    return (waiting.result() or waiting.gathered("late")) if place else None


class _Reports:
    """The reports of one attempt in a directory; each file is read once.

    Args:
        place: the directory.
        attempt: the attempt's number.
        expected: the ranks of all nodes.
    """

    def __init__(self, place: str, attempt: int, expected: Collection[str]) -> None:
        self._place, self._attempt = place, attempt
        self._missing = sorted(expected, key=int, reverse=True)
        self._found: list[NodeReport | None] = []

    def result(self) -> NodeReport | None:
        """Return the result from the first node that had all reports."""
        path = self._result_path()
        return _parsed(path) if os.path.basename(path) in _names(os.path.dirname(path)) else None

    def gathered(self, who: str) -> NodeReport | None:
        """Return the result, and write it, once all reports have come; None before.

        Args:
            who: the name of this node in the directory.
        """
        names = _names(self._place) if self._missing else set()
        while self._missing:
            path = _path(self._place, self._attempt, self._missing[-1])
            report = _parsed(path) if os.path.basename(path) in names else None
            if report is None:
                return None
            self._found.append(report)
            self._missing.pop()
        root = node_agreement.root_report(self._found)
        if root is None:
            return None
        draft = f"{self._result_path()}.{who}"
        if paths.write_private(draft, json.dumps(root).encode()):
            _name_once(draft, self._result_path())
        return self.result() or root

    def _result_path(self) -> str:
        return os.path.join(self._place, _RESULTS, f"a{self._attempt}.json")


def _name_once(draft: str, path: str) -> None:
    """Give a file its final name unless another file has it already."""
    try:
        try:
            os.link(draft, path)
        except OSError:  # it exists, or the file system has no links
            if not os.path.lexists(path):
                os.rename(draft, path)
                return
        os.unlink(draft)
    except OSError:  # the others act on the reports by themselves
        return


def _place(shared: str) -> str:
    """Return the offered directory if this node sees it; else ""."""
    if not shared:
        return ""
    place, word = json.loads(shared)
    return (
        place
        if files.read_private(os.path.join(place, node_joining.WORD_FILE)) == word.encode()
        else ""
    )


def _path(place: str, attempt: int, node: str) -> str:
    return os.path.join(place, f"a{attempt}-{node}.json")


def _names(directory: str) -> set[str]:
    try:
        return set(os.listdir(directory))
    except OSError:
        return set()


def _parsed(path: str) -> NodeReport | None:
    report: NodeReport | None = untrusted.value(files.read_private(path))
    return report
