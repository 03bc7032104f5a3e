"""A whole run whose ranks are silent asks the RAS that they have, and says what it counts."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading

import pytest
from runs import program


@pytest.mark.slow
def test_the_line_of_ras_stands_below_the_ranks(machine):
    """The ranks are gloo's, and the server is ours: it answers with their pids."""
    argv = ["--profile=h100", "--set=watch.silence_s=24", "--nproc-per-node=2"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"localhost:{listener.getsockname()[1]}"
        script = [program("evaluating"), str(machine.folder / "go")]
        with machine.start(*argv, *script, NCCL_RAS_ADDR=address) as job:

            def serve() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        with listener.accept()[0] as one:
                            one.recv(1 << 12)
                            members = [
                                {"rank": rank, "host": "h", "pid": pid,
                                 "collective_counts": {"AllReduce": 40 + rank}}
                                for rank, pid in job.ranks().items()
                            ]  # fmt: skip
                            comm = {"hash": "1", "secondary_hash": "2", "ranks": members}
                            comm["missing_ranks"] = []
                            one.sendall(b"OK\n" + json.dumps({"communicators": [comm]}).encode())

            server = threading.Thread(target=serve)
            server.start()
            job.wait_for_message(
                "NCCL's RAS: rank 0 launched 40 collectives, others of its group 41"
            )
            job.process.send_signal(signal.SIGTERM)
            job.end()
            job.nothing_lives()
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
