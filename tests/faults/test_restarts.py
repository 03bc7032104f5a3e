"""torchrun's own restarts (`--max-restarts`): they hang without us and work under saferun.

The restarted workers of a plain torchrun share the agents' store and meet stale addresses there
(https://github.com/pytorch/pytorch/issues/135712). Should they recover without planning/build.py's
SHARE_STORE, torch has fixed it.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import free_port
from runs import Run, program, ran, run
from sandbox import SAFERUN

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def two_nodes(folder: Path, *options: str) -> Iterator[list[Run]]:
    argv = [*options, "--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-id=two"]
    argv += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    with contextlib.ExitStack() as stack:
        argv.append(program("restarted_once"))
        yield [stack.enter_context(run(folder, *argv)) for _ in range(2)]


@pytest.mark.parametrize("retries", [0, 2], ids=["by exec", "supervised"])
def test_under_saferun_a_restart_on_two_nodes_recovers(tmp_path, retries):
    options = ("--profile=cpu", f"--retries={retries}")
    with two_nodes(tmp_path, *options) as nodes:
        assert [node.end() for node in nodes] == [0, 0], [node.err for node in nodes]
        assert "recovered, sum 4" in nodes[0].out + nodes[1].out
        for node in nodes:
            node.nothing_lives()
            stays = [line for line in node.messages() if "--max-restarts 1 stays" in line]
            assert len(stays) == (1 if retries else 0)


@pytest.mark.parametrize("command", [["torchrun"], [*SAFERUN, "--retries=0"]], ids=["", "saferun"])
def test_a_restarted_rank_meets_no_keys_of_its_last_life(tmp_path, command):
    """Of plain torchrun it does."""
    argv = ["--nproc-per-node=1", "--max-restarts=1", "--rdzv-backend=static"]
    argv += [f"--master-port={free_port()}", "--master-addr=127.0.0.1"]
    job = ran(tmp_path, *argv, program("keys_of_an_earlier_life"), command=command)
    assert [line.split()[-1] for line in job.out.splitlines() if line.startswith("left")] == [
        *("False", str(command == ["torchrun"]))
    ]
