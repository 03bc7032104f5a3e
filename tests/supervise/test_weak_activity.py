"""Signs of work that are looked for where a silence is nearly too long."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import until
from runs import executable

from saferun.supervise.watch.weak_activity import ANSWER_S, EVERY_S, GpuUse, WeakActivity
from saferun.system import tcp_bytes

OURS, OTHER = "GPU-1", "GPU-2"


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
        server.accept()[0] as other,
    ):
        yield one, other


def answering(folder: Path, script: str) -> GpuUse:
    """Return the question to an nvidia-smi that is this script and adds its calls to `calls`."""
    text = f'#!/bin/sh\necho "$@" >> {folder}/calls\n{script}\n'
    executable(folder / "nvidia-smi", text)
    return GpuUse({"PATH": f"{folder}:/usr/bin:/bin"}, [OURS])


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("script", "used"),
    [
        (f"echo {OTHER}, 0; echo {OURS}, 97", True),
        (f"echo {OTHER}, 97; echo {OURS}, 3", False),
        (f"echo '{OURS}, [N/A]'", False),
        (f"echo {OURS}, 97; exit 9", False),
        ("echo 'NVIDIA-SMI has failed'", False),
    ],
)
def test_a_gpu_of_the_job_in_use_is_a_sign_and_asked_for_once_in_a_while(tmp_path, script, used):
    gpus = answering(tmp_path, script)
    assert not gpus.are_used(100.0), "it is asked, and nobody waits"
    told: list[bool] = []
    until(lambda: told.append(gpus.are_used(101.0)) or gpus._asked is None, "the answer")
    assert any(told) == used
    assert not gpus.are_used(100.0 + EVERY_S - 1)
    assert len(calls(tmp_path)) == 1
    gpus.are_used(100.0 + EVERY_S)
    until(lambda: gpus.are_used(101.0 + EVERY_S) or gpus._asked is None, "it is asked again")
    assert len(calls(tmp_path)) == 2


def test_an_nvidia_smi_that_hangs_is_ended_and_not_asked_again(tmp_path):
    gpus = answering(tmp_path, "exec sleep 1000")
    gpus.are_used(0.0)
    assert gpus._asked is not None
    process, _ = gpus._asked
    until(lambda: (tmp_path / "calls").exists() and calls(tmp_path), "it runs")
    assert not gpus.are_used(ANSWER_S + 1)
    assert process.wait() < 0
    assert not gpus.are_used(2 * EVERY_S)
    assert len(calls(tmp_path)) == 1


def test_a_machine_without_gpus_is_asked_for_none(tmp_path):
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    gpus = GpuUse({"PATH": f"{tmp_path}:/usr/bin:/bin"}, [])
    assert not gpus.are_used(0.0)
    assert gpus._asked is None


def test_what_connections_carry_is_a_sign_and_a_few_bytes_are_none(connection):
    one, other = connection
    weak = WeakActivity({"PATH": ""}, [])
    pids = [os.getpid()]
    assert not weak.seen(0.0, pids)
    one.sendall(b"still there")
    other.recv(100)
    assert not weak.seen(10.0, pids)
    sent = 0
    while sent < 4 << 20:  # 64 KiB/s and more
        sent += one.send(bytes(64 << 10))
        other.recv(64 << 10, socket.MSG_WAITALL)
    assert weak.seen(20.0, pids)
    assert not weak.seen(30.0, pids)


def test_connections_of_others_are_left_out(connection):
    one, other = connection
    one.sendall(bytes(100_000))
    other.recv(100_000, socket.MSG_WAITALL)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as quiet,
    ):
        child = subprocess.Popen(["sleep", "1000"], pass_fds=[quiet.fileno()])
        counted = tcp_bytes.moved([child.pid])
        child.kill()
        child.wait()
    assert counted is not None
    assert counted < 1000
    assert (tcp_bytes.moved([os.getpid()]) or 0) > 100_000
    assert tcp_bytes.moved([]) == 0
