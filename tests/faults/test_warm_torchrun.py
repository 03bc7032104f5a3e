"""A warm agent of the real torchrun: its ranks, and how it waits."""

import json
import os
import sys
from pathlib import Path

import pytest
from helpers import PROGRAMS, SOURCES, awaits_its_task, until, warm_agent_of
from ranks import SITE, hooks
from sandbox import text_of
from supervised import supervised

from saferun.supervise.ready.keeper_pool import prepare, start_keeper
from saferun.supervise.ready.warm_start import WarmStart

pytestmark = pytest.mark.slow
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.mark.parametrize("launcher", ["console script", "module"])
def test_ranks_of_a_warm_agent_are_guarded_as_those_of_a_fresh_torchrun(tmp_path, launcher):
    pytest.importorskip("torch")
    script = PROGRAMS / "guarded_rank.py"
    arguments = [str(TORCHRUN)]
    if launcher == "module":
        arguments = [sys.executable, "-m", "torch.distributed.run"]
    seen = []
    for number, ahead in enumerate(({}, {"warm_agent": {"env": {"NCCL_P2P_DISABLE": "0"}}})):
        place = tmp_path / f"receipts{number}"
        contract = {"v": 1, "run": "test", "attempt": 2, "hooks": hooks(), "mitigations": []}
        env = {
            "PYTHONPATH": f"{SITE}{os.pathsep}{SOURCES}",
            "SAFERUN_INJECT": json.dumps({**contract, "receipts": str(place)}),
            "SAFERUN_RANK_PID": "1",
            "NCCL_P2P_DISABLE": "1",
        }
        command = [*arguments, "--nproc-per-node=2", str(script)]
        with supervised(tmp_path, command, popen={"env": env}, **ahead) as run:
            assert run.ended()["exit_code"] == 0, run.err
        lines = [json.loads(line) for file in place.iterdir() for line in _lines(file)]
        outcomes = sorted((line["rank"], line["hook"], line["outcome"]) for line in lines)
        ranks = sorted(run.out.decode().splitlines())
        assert all(json.loads(line)["marked"] and json.loads(line)["agent"] for line in ranks)
        seen.append((ranks, outcomes, run.err))
    assert seen[0] == seen[1]
    assert len(seen[0][0]) == 2
    assert {outcome[0] for outcome in seen[0][1]} >= {0, 1}


def test_waiting_agent_blocks_and_touches_no_device(tmp_path):
    pytest.importorskip("torch")
    warm = WarmStart((str(TORCHRUN), "t.py"), os.environ, sys.executable)
    standby = prepare(start_keeper(), warm)
    try:
        pid = warm_agent_of(standby.pid)
        until(lambda: awaits_its_task(pid))
        files = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert not [name for name in files if name.startswith("/dev/") and name != "/dev/null"]
        assert "cuda" not in text_of(Path(f"/proc/{pid}/maps")).replace("torch_cuda", "")
        assert os.getpgid(pid) == pid
        assert os.getsid(pid) == standby.pid
    finally:
        os.close(standby.commands)
        os.close(standby.reports)
        os.waitpid(standby.pid, 0)
    until(lambda: not Path(f"/proc/{pid}").exists())


def _lines(file: Path) -> list[str]:
    return text_of(file).splitlines()
