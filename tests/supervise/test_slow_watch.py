"""Ranks are asked for the times of their collectives only while their job works."""

import os
import sys
from types import SimpleNamespace

from helpers import children

from saferun.gpu import nvml
from saferun.supervise.watch import slow_watch


def test_a_silent_job_is_not_asked_and_who_tells_of_the_gpus_ends_with_the_attempt(
    tmp_path, monkeypatch
):
    """An answer would look like work."""
    monkeypatch.setattr(slow_watch.process_tree, "catches", lambda pid, number: True)
    asked = []
    monkeypatch.setattr(slow_watch, "_signal", lambda pid, number: asked.append(pid))
    monkeypatch.setattr(nvml, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    for pid in (10, 11):
        (tmp_path / f"a1-rank0-pid{pid}.jsonl").touch()
    gpus = SimpleNamespace(gpus=[SimpleNamespace(uuid="G")])
    plan = SimpleNamespace(launcher="torchrun", gpus=gpus)
    ranks = {0: 10, 1: 11}
    job = SimpleNamespace(
        plan=plan, receipts=str(tmp_path), ranks=lambda: ranks, environ=os.environ
    )
    hangs = SimpleNamespace(is_silent=True)
    watch = slow_watch.SlowWatch(job, hangs)
    assert watch.look() == slow_watch.FIRST_S
    watch.look()
    assert asked == []
    before = set(children(os.getpid()))  # other tests' servers
    hangs.is_silent = False
    watch.look()
    assert asked == [10, 11]
    (child,) = set(children(os.getpid())) - before
    watch.ended(None)
    assert child not in children(os.getpid())
