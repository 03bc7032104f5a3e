"""Reports through a directory that all nodes see: real files, and a thread for each node."""

from __future__ import annotations

import collections
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from saferun.base import files
from saferun.inject.node import node_agreement
from saferun.supervise.nodes import shared_reports
from saferun.system import paths


def report(node: int, weight: int = node_agreement.ECHO) -> node_agreement.NodeReport:
    whole: Any = {
        **{"attempt": 1, "host": f"h{node}", "node": node, "weight": weight, "after_s": 1.0},
        **{"diagnosis": {}, "facts": {}, "decision": {}},
    }
    found: node_agreement.NodeReport = whole
    return found


def exchanged(
    shared: str, reports: list[node_agreement.NodeReport], expected: int
) -> list[str | None]:
    """Have nodes exchange reports at once; return the host of the root that each one got."""
    names = [str(node) for node in range(expected)]
    found: dict[int, str | None] = {}

    def one(report: node_agreement.NodeReport) -> None:
        root = shared_reports.exchange(shared, report, names)
        found[report["node"]] = root and root["host"]

    threads = [threading.Thread(target=one, args=(report,)) for report in reports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[report["node"]] for report in reports]


def put(shared: str, *reports: node_agreement.NodeReport) -> None:
    """Leave the reports of nodes that do nothing more."""
    place = json.loads(shared)[0]
    for one in reports:
        path = os.path.join(place, f"a1-{one['node']}.json")
        assert paths.write_private(path, json.dumps(one).encode())


def root_host(shared: str, expected: list[str]) -> str | None:
    """Return the host of the root as a late node reads it."""
    root = shared_reports.read(shared, 1, expected)
    return root and root["host"]


@pytest.fixture
def shared(tmp_path: Path) -> str:
    return shared_reports.offer(str(tmp_path))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """What is read, and how often, by file."""
    found: collections.Counter[str] = collections.Counter()
    original = files.read_private

    def read(path: str, limit: int = 1 << 20) -> bytes | None:
        content = original(path, limit)
        if content is not None:
            found[os.path.basename(path)] += 1
        return content

    monkeypatch.setattr(files, "read_private", read)
    return found


def test_each_report_is_read_once_and_not_by_every_node(
    shared: str, reads: collections.Counter[str]
):
    reports = [report(2, node_agreement.ROOT), *(report(node) for node in range(12) if node != 2)]
    assert exchanged(shared, reports, 12) == ["h2"] * 12
    assert [reads[f"a1-{node}.json"] for node in range(12)] == [1] * 12


def test_what_an_nfs_client_keeps_as_absent_is_found(shared: str, monkeypatch: pytest.MonkeyPatch):
    """It does not ask the server for a file again until the directory is listed."""
    monkeypatch.setattr(shared_reports, "_NEXT_S", 0.0)
    absent: set[str] = set()
    read, listed = files.read_private, os.listdir

    def reads(path: str, limit: int = 1 << 20) -> bytes | None:
        content = None if path in absent else read(path, limit)
        if content is None:
            absent.add(path)
        return content

    def lists(path: str) -> list[str]:
        names = listed(path)
        absent.difference_update({os.path.join(path, name) for name in names})
        return names

    monkeypatch.setattr(files, "read_private", reads)
    monkeypatch.setattr(shared_reports.os, "listdir", lists)
    later = threading.Timer(0.5, put, [shared, report(0, node_agreement.ROOT)])
    later.start()
    assert exchanged(shared, [report(1), report(2)], 3) == ["h0", "h0"]


def test_where_the_lowest_node_does_not_read_the_next_one_does(
    shared: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_reports, "_NEXT_S", 0.2)
    put(shared, report(0))
    assert exchanged(shared, [report(1), report(2, node_agreement.ROOT)], 3) == ["h2", "h2"]


def test_a_node_that_does_not_come_leaves_no_result(shared: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_reports, "WAIT_S", 0.3)
    monkeypatch.setattr(shared_reports.node_watch, "BEAT_S", 0.0)
    assert exchanged(shared, [report(0), report(1)], 3) == [None, None]
    assert root_host(shared, ["0", "1", "2"]) is None


def test_a_late_node_gathers_the_result_or_reads_it(shared: str):
    put(shared, report(0), report(1, node_agreement.ROOT), report(3, node_agreement.ROOT))
    assert root_host(shared, ["0", "1", "2"]) is None
    assert root_host(shared, ["0", "1"]) == "h1"
    assert root_host(shared, ["0", "1", "2"]) == "h1"
    assert root_host(shared, ["3"]) == "h1", "the first result is that of all"


def test_a_directory_that_is_not_shared_gives_nothing(shared: str, tmp_path: Path):
    (tmp_path / "nodes" / "word").write_text("another's", encoding="utf-8")
    assert exchanged(shared, [report(0)], 1) == [None]
