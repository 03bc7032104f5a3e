"""A whole run whose ranks are silent asks the RAS that they have, and says what it counts."""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from runs import Run, program, run


@contextlib.contextmanager
def ras(answer: Callable[[], dict[str, Any]]) -> Iterator[str]:
    """Answer as RAS does, whoever asks; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listener.accept()[0] as one:
                        one.recv(1 << 12)
                        document = {"communicators": [{"hash": "1", "secondary_hash": "2"}]}
                        document["communicators"][0] |= answer()
                        one.sendall(b"OK\n" + json.dumps(document).encode())

        server = threading.Thread(target=serve)
        server.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        server.join()


def member(rank: int, pid: int, launched: int) -> dict[str, Any]:
    return {"rank": rank, "host": "h", "pid": pid, "collective_counts": {"AllReduce": launched}}


@pytest.mark.slow
@pytest.mark.parametrize(("state", "agrees"), [("scheduled", True), ("completed", False)])
def test_a_rank_that_is_gone_by_ras_and_the_recorder_ends_the_attempt_early(machine, state, agrees):
    """It has left with status 0, so that torchrun waits for the others. RAS alone ends nothing."""
    argv = ["--profile=h100", "--set=watch.silence_s=30", "--set=watch.mode=end", "--retries=0"]
    fast = [sys.executable, program("fast_watch")]  # 120 s are 12
    jobs: list[Run] = []
    pid = machine.folder / "pid"

    def answer() -> dict[str, Any]:
        gone = {"rank": 0, "host": "h", "pid": int(pid.read_text(encoding="utf-8"))}
        gone["status"] = {"considered_dead": True}
        ranks = [member(n, pid, 41) for n, pid in jobs[0].ranks().items() if n]
        return {"ranks": ranks, "missing_ranks": [gone]}

    with ras(answer) as address:
        environ = {**machine.environ, "NCCL_RAS_ADDR": address}
        script = ["--nproc-per-node=3", program("left_alone"), state, str(pid)]
        with run(machine.folder, *argv, *script, env=environ, command=fast) as job:
            jobs.append(job)
            assert job.end() != 0
            job.nothing_lives()
            (hang,), (ended,) = job.events("hang"), job.events("ended")
            (stall,) = job.events("stall")
    assert (hang["silent_s"] < 30) == agrees
    assert (ended["kind"], ended["root_rank"], ended["ended_by"]) == ("hang", 0, "hang")
    assert ("rank 0: dead, or gives no answer" in ended["root_line"]) == agrees
    assert stall["line"].startswith("rank 0 has ended, 2 ranks wait for it in ")
