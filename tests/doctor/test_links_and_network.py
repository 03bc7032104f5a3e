"""The ways between GPUs and machines: transfers that are checked, NVLink, RDMA, interfaces, ports.

The CUDA driver is a fake whose GPUs are the host's memory; the program that tries it is the real
one, in a real process.
"""

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

import pytest
from cases import check_cases
from fake_nvml import answer, bus

from saferun.doctor.checks import checks_links, checks_network
from saferun.doctor.collect import network, nvidia
from saferun.doctor.vitals import Cuda, InfiniBand, Interface, Limits, Network, Port
from saferun.gpu.nvml import NvmlAnswer
from saferun.model import NOTE, OK, PROBLEM
from saferun.system.redact import Masker

PLAIN = Masker({}, ())


# peer to peer


@pytest.fixture
def tried(libcuda: Path) -> Callable[..., Cuda]:
    """Try the pairs of a machine of two GPUs whose transfers do what the environment says."""

    def run(timeout_s: float = 20, **environ: str) -> Cuda:
        environ = {"LD_LIBRARY_PATH": str(libcuda), **environ}
        return nvidia.ask_cuda(environ, timeout_s)

    return run


def levels(found):
    return [finding.level for finding in found]


def test_good_transfers_are_checked_in_both_directions_and_three_ways(tried):
    cuda = tried()
    assert [(tuple(p["pair"]), p["copy"], p["read"], p["write"]) for p in cuda.pairs] == [
        ((0, 1), "ok", "ok", "ok"),
        ((1, 0), "ok", "ok", "ok"),
    ]
    (found,) = checks_links.peers(NvmlAnswer(), cuda)
    assert (found.level, "2 of them direct" in found.what) == (OK, True)
    assert (cuda.driver, cuda.devices[1]["capability"]) == (13000, "9.0")


@pytest.mark.parametrize("way", ["copy", "read", "write"])
@pytest.mark.parametrize("fault", ["wrong", "lost"], ids=["one wrong bit", "nothing is written"])
def test_a_fault_of_any_way_is_a_problem_of_that_pair(tried, way, fault):
    (found,) = checks_links.peers(NvmlAnswer(), tried(FAKE_CUDA_PEERS=f"1:0:{way}:{fault}"))
    assert (found.level, found.area) == (PROBLEM, "GPU 1 to 0")
    assert found.detail.count("wrong: ") == 1
    assert ("wrong: 1 of " in found.detail) == (fault == "wrong")
    assert "NCCL_P2P_DISABLE=1" in found.fix


def test_a_transfer_that_does_not_come_to_its_end_is_named_and_those_before_it_are_kept(tried):
    cuda = tried(1, FAKE_CUDA_PEERS="0:1:copy:hang")
    (found,) = checks_links.peers(NvmlAnswer(), cuda)
    assert (cuda.hung, found.level, found.area) == ((0, 1), PROBLEM, "GPU 0 to 1")
    found = [*checks_links.peers(NvmlAnswer(), tried(FAKE_CUDA_PEERS="0:1:copy:719"))]
    assert (found[0].level, "CUDA_ERROR_LAUNCH_FAILED" in found[0].what) == (PROBLEM, True)
    cuda = tried(FAKE_CUDA_PEERS="1:0:read:crash")
    assert (len(cuda.pairs), cuda.hung, "SIGABRT" in cuda.trouble) == (1, (1, 0), True)


def test_without_direct_access_copies_through_the_host_are_checked(tried):
    cuda = tried(FAKE_CUDA_APART="1", FAKE_CUDA_PEERS="0:1:copy:wrong")
    found = [*checks_links.peers(NvmlAnswer(peers={(0, 1): "CNS", (1, 0): "CNS"}), cuda)]
    assert levels(found) == [PROBLEM, NOTE]
    assert "through host memory too" in found[0].what
    assert "chipset not supported" in found[1].detail
    cuda = tried(FAKE_CUDA_NO_JIT="1")  # the driver has no compiler
    assert {pair["copy"] for pair in cuda.pairs} == {"ok"}
    assert not any("read" in pair for pair in cuda.pairs)


def test_what_cannot_be_tried_is_left_out(tried):
    (found,) = checks_links.peers(NvmlAnswer(), tried(FAKE_CUDA_BAD="1:context:2"))
    assert (found.level, found.area, "OUT_OF_MEMORY" in found.what) == (NOTE, "GPU 1", True)
    for environ, status in (({"FAKE_CUDA_INIT": "802"}, 802), ({"FAKE_CUDA_GPUS": "1"}, 0)):
        cuda = tried(**environ)
        assert (cuda.status, list(checks_links.peers(NvmlAnswer(), cuda))) == (status, [])
    if not nvidia.driver_files().version:
        cuda = nvidia.ask_cuda({}, 20)
        assert ("libcuda" in cuda.missing, list(checks_links.peers(NvmlAnswer(), cuda))) == (
            True,
            [],
        )


def test_gpus_are_named_as_nvml_counts_them():
    seen = answer(4)
    devices = ({"device": 0, "bus": bus(3)}, {"device": 1, "bus": bus(2)})  # CUDA_VISIBLE_DEVICES
    pair = {"pair": [0, 1], "can": True, "copy": "wrong: 4 of 8 bytes"}
    (found,) = checks_links.peers(seen, Cuda(devices=devices, pairs=(pair,)))
    assert found.area == "GPU 3 to 2"


# NVLink and RDMA


def port(state="ACTIVE", physical="LinkUp", rate="400 Gb/sec (4X NDR)", layer="InfiniBand"):
    return InfiniBand("mlx5_0", "1", state, physical, rate, layer)


def nvlinks(*up, known=18):
    return checks_links.nvlinks(NvmlAnswer(links={n: (some, known) for n, some in enumerate(up)}))


def rdma(*ports, off=False, **limits):
    return checks_links.infiniband(ports, Limits(**limits), off)


LINKS = {
    "all up": (nvlinks(18, 18), [OK]),
    "one short": (nvlinks(18, 16, 18), [PROBLEM]),
    "none up": (nvlinks(0, 0), [NOTE]),
    "no NVLink": (nvlinks(0, 0, known=0), []),
    "one GPU": (nvlinks(18), []),
    "active": (rdma(port()), [OK]),
    "down": (rdma(port(), port("DOWN", "LinkUp")), [PROBLEM, OK]),
    "no cable": (rdma(port(), port("DOWN", "Polling")), [NOTE, OK]),
    "disabled": (rdma(port(), port("DOWN", "Disabled")), [OK]),
    "Ethernet": (rdma(port("DOWN", "LinkUp", layer="Ethernet")), [NOTE]),
    "locked memory": (rdma(port(), locked=65536), [PROBLEM, OK]),
    "switched off": (rdma(port(), off=True), [NOTE, OK]),
    "slower": (rdma(port(), port(rate="200 Gb/sec (4X HDR)")), [NOTE, OK]),
    "no RDMA": (rdma(locked=65536), []),
}


def test_links_are_judged(tmp_path):
    def check(found, expected):
        assert levels(found) == expected

    check_cases(LINKS, check)
    base = tmp_path / "mlx5_0" / "ports" / "1"
    base.mkdir(parents=True)
    shown = ("4: ACTIVE", "5: LinkUp", "400 Gb/sec (4X NDR)", "InfiniBand")
    names = ("state", "phys_state", "rate", "link_layer")
    for name, text in zip(names, shown, strict=True):
        (base / name).write_text(text + "\n", encoding="utf-8")
    assert network.infiniband(str(tmp_path)) == (port(),)


# which interface NCCL and gloo take

LO = Interface("lo", ipv4="127.0.0.1")
ETH = Interface("eth0", ipv4="10.0.0.5", speed_mbps=100_000)
ETH1 = Interface("eth01", ipv4="10.2.0.5")
IB = Interface("ibp24s0", ipv4="10.1.0.5")
DOCKER = Interface("docker0", ipv4="172.17.0.1")
SIX = Interface("ens7", ipv6=True)
MANY = {"SLURM_NNODES": "2"}
CHOSEN = {
    "InfiniBand first": ([LO, ETH, IB], "", "ibp24s0"),
    "no docker": ([LO, DOCKER, ETH], "", "eth0"),
    "docker": ([LO, DOCKER], "", "docker0"),
    "loopback at last": ([LO], "", "lo"),
    "IPv4 first": ([LO, SIX, ETH], "", "eth0 ens7"),
    "a prefix": ([LO, ETH, IB], "eth", "eth0"),
    "all but a prefix": ([LO, ETH, IB], "^ib", "lo eth0"),
    "a whole name": ([LO, ETH, ETH1], "=eth0", "eth0"),
    "a prefix of two": ([LO, ETH, ETH1], "eth0", "eth0 eth01"),
    "all but whole names": ([LO, ETH, IB], "^=eth0,lo", "ibp24s0"),
    "by index": ([LO, ETH, IB], "ib,eth", "eth0 ibp24s0"),
    "no match": ([LO, ETH], "ens", ""),
    "one letter is ignored": ([LO, ETH, IB], "e", "ibp24s0"),
    "none": ([], "", ""),
}


def test_interfaces_are_chosen_as_in_nccls_source():
    def check(found, wanted, names):
        chosen = checks_network.nccl_interfaces(found, wanted)
        assert " ".join(interface.name for interface in chosen) == names

    check_cases(CHOSEN, check)


def nccl(*found, **environ):
    return checks_network.nccl(Network("node1", interfaces=found), environ)


def named(*addresses, seconds=0.0):
    trouble = "" if addresses else "Name unknown"
    return Network("node1", addresses, trouble, seconds, (LO, ETH))


def gloo(*addresses, **environ):
    return checks_network.gloo(named(*addresses), environ)


REACHED = (
    (nccl(LO, ETH), OK, "NCCL takes eth0 (10.0.0.5, 100 Gb/s)"),
    (nccl(LO, ETH, NCCL_SOCKET_IFNAME="ens3"), PROBLEM, "matches no interface"),
    (nccl(LO, replace(ETH, carrier=False)), PROBLEM, "it is down"),
    (nccl(LO, replace(ETH, up=False)), PROBLEM, "it is down"),
    (nccl(LO), OK, "NCCL takes lo"),
    (nccl(LO, **MANY), PROBLEM, "no other machine"),
    (nccl(LO, DOCKER, **MANY), PROBLEM, "containers only"),
    (nccl(LO, DOCKER), OK, "docker0"),
    (nccl(Interface("eth0")), PROBLEM, "no interface has an address"),
    (gloo("10.0.0.5"), OK, "gloo takes eth0"),
    (gloo("127.0.1.1"), OK, "resolves to 127.0.1.1"),  # Debian's line
    (gloo("127.0.1.1", **MANY), PROBLEM, "which other machines cannot reach"),
    (gloo(), NOTE, "does not resolve"),
    (gloo(**MANY), PROBLEM, "does not resolve"),
    (gloo("10.9.9.9", **MANY), PROBLEM, "not to this machine"),
    (gloo("10.9.9.9", "10.0.0.5", **MANY), OK, "gloo takes eth0"),
    (gloo("127.0.1.1", **MANY, GLOO_SOCKET_IFNAME="eth0"), OK, "gloo takes eth0"),
    (gloo("10.0.0.5", GLOO_SOCKET_IFNAME="eth7"), PROBLEM, "names eth7"),
)


def test_the_interfaces_of_nccl_and_gloo_must_reach_other_machines():
    def check(found, level, clause):
        (reported,) = found
        assert (reported.level, clause in reported.what) == (level, True), reported

    check_cases(REACHED, check)


def test_a_job_of_several_machines_is_recognised_by_its_environment():
    for environ, many in (
        ({"SLURM_NNODES": "1"}, False),
        ({"SLURM_JOB_NUM_NODES": "4"}, True),
        ({"PET_NNODES": "2:4"}, True),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"SLURM_NNODES": "x"}, False),
    ):
        assert checks_network.many_nodes(environ) is many, environ


def test_a_name_that_resolves_slowly_is_a_note():
    for seconds, expected in ((11.0, [NOTE]), (0.0, [])):
        slow = named("10.0.0.5", seconds=seconds)
        assert levels(checks_network.name_service(slow)) == expected


# this machine's network, for real


def test_this_machines_interfaces_are_found():
    found = {interface.name: interface for interface in network.interfaces()}
    assert found["lo"].ipv4 == "127.0.0.1"
    assert [found[name].name for _, name in sorted(socket.if_nameindex())] == list(found)


def test_a_host_name_that_does_not_resolve_has_a_reason():
    addresses, trouble, _ = network.resolve("\0")
    assert (addresses, trouble != "") == ((), True)
    assert network.resolve("127.0.0.1")[0] == ("127.0.0.1",)


def test_a_taken_port_is_reported_with_its_process():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        number = held.getsockname()[1]
        held.listen()
        seen = network.port(number, PLAIN)
    assert (seen.taken, seen.pid) == (True, os.getpid())
    assert os.path.basename(sys.argv[0]) in seen.command or "python" in seen.command
    (found,) = checks_network.ports(Network(ports=(seen,)))
    assert (found.level, f"pid {os.getpid()}" in found.what) == (PROBLEM, True)


def test_a_port_that_is_only_used_by_a_connection_is_free():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as client:
            number = client.getsockname()[1]
            assert network.port(number, PLAIN) == Port(number)


def test_a_secret_in_the_holders_command_line_is_masked():
    with socket.create_server(("127.0.0.1", 0)) as held:
        argv = ["train", "-c", "kill -STOP $$", "--api-key", "sk-1234567890abcdef"]
        number, holder = held.getsockname()[1], Popen(argv, executable="/bin/sh", stdin=held)
    with holder:
        seen = network.port(number, PLAIN)
        holder.kill()
    assert (seen.pid, "sk-1234567890abcdef" in seen.command) == (holder.pid, False)
    assert seen.command.startswith("train -c kill -STOP $$ --api-key")


def test_a_port_of_another_user_is_reported_without_its_process():
    (found,) = checks_network.ports(Network(ports=(Port(29500, taken=True),)))
    assert "somebody else" in found.what
    assert "29501" in found.fix
