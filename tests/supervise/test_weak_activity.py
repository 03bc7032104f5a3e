"""Signs of work that are looked for where a silence is nearly too long."""

import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_nvml import Nvml, gpu
from helpers import until

from saferun.gpu.nvml import LIBRARY
from saferun.supervise.watch.weak_activity import ANSWER_S, EVERY_S, GpuUse, Traffic
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


@pytest.fixture
def nvml(tmp_path: Path) -> Nvml:
    return Nvml(tmp_path / "nvml")


def use_of(nvml: Nvml) -> GpuUse:
    return GpuUse({"LD_LIBRARY_PATH": str(nvml.folder)}, [OURS])


def loads(*percents: str) -> list[dict]:
    return [
        gpu(n, GetUUID=uuid, GetUtilizationRates=percent)
        for n, (uuid, percent) in enumerate(zip((OTHER, OURS), percents, strict=True))
    ]


@pytest.mark.parametrize(
    ("gpus", "general", "used"),
    [
        (loads("0 0", "97 0"), {}, True),
        (loads("97 0", "3 0"), {}, False),
        (loads("0 0", "!3"), {}, False),
        (loads("0 0", "97 0"), {"Init_v2": "!9"}, False),
        (loads("0 0", "97 0"), {"Init_v2": "crash"}, False),
    ],
    ids=["ours", "another's", "not supported", "no driver", "crash"],
)
def test_a_gpu_of_the_job_in_use_is_a_sign_and_asked_for_once_in_a_while(nvml, gpus, general, used):
    nvml.reports(*gpus, **general)
    asks = use_of(nvml)
    assert not asks.are_used(100.0), "it is asked, and nobody waits"
    told: list[bool] = []
    until(lambda: told.append(asks.are_used(101.0)) or asks._asked is None, "the answer")
    assert any(told) == used
    assert not asks.are_used(100.0 + EVERY_S - 1)
    assert nvml.asked == 1
    asks.are_used(100.0 + EVERY_S)
    until(lambda: asks.are_used(101.0 + EVERY_S) or asks._asked is None, "it is asked again")
    assert nvml.asked == 2


def test_an_nvml_that_hangs_is_ended_and_not_asked_again(nvml):
    nvml.reports(Init_v2="hang")
    asks = use_of(nvml)
    asks.are_used(0.0)
    process = asks._asked._process
    until(lambda: nvml.asked, "it is asked")
    assert not asks.are_used(ANSWER_S + 1)
    assert process.wait() < 0
    assert not asks.are_used(2 * EVERY_S)
    assert nvml.asked == 1


def test_a_machine_without_the_library_is_not_asked_again(nvml):
    (nvml.folder / LIBRARY).unlink()
    (nvml.folder / LIBRARY).touch()
    asks = use_of(nvml)
    asks.are_used(0.0)
    until(lambda: asks.are_used(1.0) or asks._asked is None, "the answer")
    asks.are_used(2 * EVERY_S)
    assert asks._asked is None


def test_what_connections_carry_is_a_sign_and_a_few_bytes_are_none(connection):
    one, other = connection
    traffic = Traffic()
    pids = [os.getpid()]
    assert not traffic.is_more(0.0, pids)
    one.sendall(b"still there")
    other.recv(100)
    assert not traffic.is_more(10.0, pids)
    sent = 0
    while sent < 4 << 20:  # 64 KiB/s and more
        sent += one.send(bytes(64 << 10))
        other.recv(64 << 10, socket.MSG_WAITALL)
    assert traffic.is_more(20.0, pids)
    assert not traffic.is_more(30.0, pids)


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
