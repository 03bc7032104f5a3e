"""`notify` in a run of two hosts: one of them tells, for both."""

import json
import sys

import hosts
import pytest
from rights import needs
from runs import program

pytestmark = needs("make networks")


@pytest.mark.slow
def test_one_of_the_nodes_tells_of_the_end(pair, tmp_path):
    place = tmp_path / "events"
    command = [sys.executable, program("keeps_event"), str(place)]
    told = [f"--set=notify.command={json.dumps(command)}", "--set=retry.backoff_s=[0, 0]"]
    job = [program("counting_job"), str(tmp_path / "out"), "20", "SIGSEGV", "1", "12", "1"]
    runs = [host.start(*hosts.meeting(), *told, *job) for host in pair]
    assert hosts.end_all(runs) == [0, 0], [run.err for run in runs]
    (event,) = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
    assert (event["event"], event["attempt"]) == ("finished", 2)
