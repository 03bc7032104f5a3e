"""Ranks are asked for the times of their collectives only while their job works."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
