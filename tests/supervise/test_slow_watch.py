"""Ranks are asked for the times of their collectives only while their job works."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from helpers import children

from saferun.gpu import nvml
from saferun.supervise.watch import slow_watch


@pytest.mark.parametrize(("is_silent", "asked"), [(True, 0), (False, 1)])
def test_ranks_of_a_silent_job_are_not_asked_since_an_answer_would_look_like_work(
    tmp_path, monkeypatch, is_silent, asked
):
    looked_for = []
    monkeypatch.setattr(
        slow_watch.rank_processes, "ranks", lambda pid: looked_for.append(pid) or {}
    )
    plan = SimpleNamespace(launcher="torchrun", gpus=SimpleNamespace(gpus=()))
    record = SimpleNamespace(fault=lambda error: pytest.fail(str(error)))
    watch = slow_watch.SlowWatch(plan, str(tmp_path), record, lambda: is_silent, print, {})
    watch.started(1, 2)
    assert watch.check_job() == slow_watch.FIRST_S
    watch.check_job()
    assert looked_for == [2] * asked


def test_whoever_tells_of_the_gpus_is_not_left_behind_by_the_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_watch.rank_processes, "ranks", lambda pid: {0: 10, 1: 11})
    monkeypatch.setattr(slow_watch.process_tree, "catches", lambda pid, number: True)
    monkeypatch.setattr(slow_watch, "_signal", lambda pid, number: None)
    monkeypatch.setattr(nvml, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    for pid in (10, 11):
        (tmp_path / f"a1-rank0-pid{pid}.jsonl").touch()
    plan = SimpleNamespace(
        launcher="torchrun", gpus=SimpleNamespace(gpus=[SimpleNamespace(uuid="G")])
    )
    record = SimpleNamespace(fault=lambda error: pytest.fail(str(error)))
    watch = slow_watch.SlowWatch(
        plan, str(tmp_path), record, lambda: False, print, dict(os.environ)
    )
    before = set(children(os.getpid()))  # other tests' servers
    watch.check_job()
    watch.check_job()
    (child,) = set(children(os.getpid())) - before
    watch.ended()
    assert child not in children(os.getpid())
