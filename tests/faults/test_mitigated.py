"""A failure goes away because the loop changed the one setting that caused it."""

from __future__ import annotations

import json
import resource
import socket

import pytest
from runs import run

MEET = """
import torch.distributed as dist
dist.init_process_group("gloo")
print("met")
dist.destroy_process_group()
"""
HUNGRY = "files = [open('/dev/null') for _ in range(400)]; print('opened')\n"
# The words are torch's; only a GPU says them by itself.
STRAY = """
import os
for step in range(1, {steps} + 1):
    print(f"step {{step}} loss 1.0", flush=True)
if os.environ["SAFERUN_ATTEMPT"] == "1":
    raise RuntimeError("CUDA error: an illegal memory access was encountered")
"""


def limited():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))


def written(folder, text):
    path = folder / "t.py"
    path.write_text(text)
    return str(path)


def test_a_port_that_is_taken_is_left_for_a_free_one(tmp_path):
    script = written(tmp_path, MEET)
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with run(tmp_path, f"--master-port={port}", "--nproc-per-node=2", script) as job:
            assert job.end() == 0, job.err
            job.nothing_lives()
    assert job.out.count("met") == 2
    assert "free-port" in job.err
    assert [e["add"] for e in job.events("ended")] == ["free-port", ""]


def test_a_limit_of_open_files_is_raised_as_far_as_it_goes(tmp_path):
    script = written(tmp_path, HUNGRY)
    with run(tmp_path, script, preexec_fn=limited) as job:
        assert job.end() == 0, job.err
        job.nothing_lives()
    assert job.out == "opened\n"
    assert [e["add"] for e in job.events("ended")] == ["more-open-files", ""]


def test_a_mitigation_is_remembered_and_applied_from_the_start_next_time(tmp_path):
    script = written(tmp_path, HUNGRY)
    with run(tmp_path, script, preexec_fn=limited) as first:
        assert first.end() == 0, first.err
    (mitigations,) = first.home.glob(".local/state/saferun/mitigations.json")
    assert [c["mitigation"] for c in json.loads(mitigations.read_text())["mitigations"]] == [
        "more-open-files"
    ]
    with run(tmp_path, script, preexec_fn=limited) as second:
        assert second.end() == 0, second.err
        assert second.out == "opened\n"
    assert "from the history: more-open-files" in second.err
    assert "attempt 1 failed" not in second.err


def test_mitigations_can_be_switched_off_and_the_advice_remains(tmp_path):
    script = written(tmp_path, HUNGRY)
    words = ["--set", "mitigate.enabled=false", script]
    with run(tmp_path, *words, preexec_fn=limited) as job:
        assert job.end() == 1
        assert len(job.events("ended")) == 1
    assert "mitigations are switched off" in job.err
    assert "ulimit -n" in job.err


@pytest.mark.parametrize(("steps", "attempts"), [(600, 2), (5, 1)], ids=["late", "early"])
def test_a_stray_access_is_tried_again_only_where_many_steps_went_well(tmp_path, steps, attempts):
    script = written(tmp_path, STRAY.format(steps=steps))
    with run(tmp_path, script) as job:
        assert job.end() == (0 if attempts == 2 else 1), job.err
        assert len(job.events("ended")) == attempts
