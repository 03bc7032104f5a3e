"""The ways between GPUs and machines: transfers that are checked, NVLink, RDMA, interfaces, ports.

The CUDA driver is a fake whose GPUs are the host's memory; the program that tries it is the real
one, in a real process.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import answer, bus

from saferun.doctor.checks import checks_links, checks_network
from saferun.doctor.collect import network, nvidia
from saferun.doctor.vitals import Cuda, InfiniBand, Interface, Limits, Network, Port
from saferun.gpu.nvml import Answer
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
    (found,) = checks_links.peers(Answer(), cuda)
    assert (found.level, "2 of them direct" in found.what) == (OK, True)
    assert (cuda.driver, cuda.devices[1]["capability"]) == (13000, "9.0")


@pytest.mark.parametrize("way", ["copy", "read", "write"])
def test_one_wrong_bit_by_any_way_is_a_problem_of_that_pair(tried, way):
    (found,) = checks_links.peers(Answer(), tried(FAKE_CUDA_PEERS=f"1:0:{way}:wrong"))
    assert (found.level, found.area) == (PROBLEM, "GPU 1 to 0")
    assert "wrong: 1 of " in found.detail
    assert "NCCL_P2P_DISABLE=1" in found.fix


@pytest.mark.parametrize("way", ["copy", "read", "write"])
def test_a_transfer_that_writes_nothing_is_a_problem(tried, way):
    (found,) = checks_links.peers(Answer(), tried(FAKE_CUDA_PEERS=f"1:0:{way}:lost"))
    assert (found.level, found.area) == (PROBLEM, "GPU 1 to 0")
    assert found.detail.count("wrong: ") == 1


def test_a_transfer_that_hangs_is_named(tried):
    cuda = tried(1, FAKE_CUDA_PEERS="0:1:copy:hang")
    assert cuda.hung == (0, 1)
    (found,) = checks_links.peers(Answer(), cuda)
    assert (found.level, found.area) == (PROBLEM, "GPU 0 to 1")


def test_a_transfer_that_fails_is_a_problem(tried):
    found = [*checks_links.peers(Answer(), tried(FAKE_CUDA_PEERS="0:1:copy:719"))]
    assert found[0].level == PROBLEM
    assert "CUDA_ERROR_LAUNCH_FAILED" in found[0].what


def test_results_before_a_crash_of_the_driver_are_kept(tried):
    cuda = tried(FAKE_CUDA_PEERS="1:0:read:crash")
    assert (len(cuda.pairs), cuda.hung) == (1, (1, 0))
    assert "SIGABRT" in cuda.trouble


def test_without_direct_access_copies_through_the_host_are_checked(tried):
    cuda = tried(FAKE_CUDA_APART="1", FAKE_CUDA_PEERS="0:1:copy:wrong")
    found = [*checks_links.peers(Answer(peers={(0, 1): "CNS", (1, 0): "CNS"}), cuda)]
    assert levels(found) == [PROBLEM, NOTE]
    assert "through host memory too" in found[0].what
    assert "chipset not supported" in found[1].detail


def test_without_a_compiler_in_the_driver_copies_are_still_checked(tried):
    cuda = tried(FAKE_CUDA_NO_JIT="1")
    assert {pair["copy"] for pair in cuda.pairs} == {"ok"}
    assert not any("read" in pair for pair in cuda.pairs)


def test_a_gpu_without_memory_for_a_context_is_left_out(tried):
    (found,) = checks_links.peers(Answer(), tried(FAKE_CUDA_BAD="1:context:2"))
    assert (found.level, found.area) == (NOTE, "GPU 1")
    assert "OUT_OF_MEMORY" in found.what


@pytest.mark.parametrize(
    ("environ", "status"), [({"FAKE_CUDA_INIT": "802"}, 802), ({"FAKE_CUDA_GPUS": "1"}, 0)]
)
def test_a_machine_without_pairs_has_no_finding(tried, environ, status):
    cuda = tried(**environ)
    assert cuda.status == status
    assert list(checks_links.peers(Answer(), cuda)) == []


def test_a_machine_without_libcuda_has_no_finding():
    if nvidia.driver_files().version:
        pytest.skip("needs a machine without a GPU driver")
    cuda = nvidia.ask_cuda({}, 20)
    assert "libcuda" in cuda.missing
    assert list(checks_links.peers(Answer(), cuda)) == []


def test_gpus_are_named_as_nvml_counts_them():
    seen = answer(4)
    devices = ({"device": 0, "bus": bus(3)}, {"device": 1, "bus": bus(2)})  # CUDA_VISIBLE_DEVICES
    pair = {"pair": [0, 1], "can": True, "copy": "wrong: 4 of 8 bytes"}
    (found,) = checks_links.peers(seen, Cuda(devices=devices, pairs=(pair,)))
    assert found.area == "GPU 3 to 2"


# NVLink and RDMA


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ({0: (18, 18), 1: (18, 18)}, [OK]),
        ({0: (18, 18), 1: (16, 18), 2: (18, 18)}, [PROBLEM]),
        ({0: (0, 12), 1: (0, 12)}, [NOTE]),
        ({0: (0, 0), 1: (0, 0)}, []),
        ({0: (18, 18)}, []),
    ],
    ids=["all up", "one short", "none up", "no NVLink", "one GPU"],
)
def test_nvlinks_are_compared_between_gpus(links, expected):
    assert levels(checks_links.nvlinks(Answer(links=links))) == expected


def port(state="ACTIVE", physical="LinkUp", rate="400 Gb/sec (4X NDR)", layer="InfiniBand"):
    return InfiniBand("mlx5_0", "1", state, physical, rate, layer)


@pytest.mark.parametrize(
    ("ports", "limits", "disabled", "expected"),
    [
        pytest.param([port()], Limits(), False, [OK], id="active"),
        pytest.param([port(), port("DOWN", "LinkUp")], Limits(), False, [PROBLEM, OK], id="down"),
        pytest.param([port(), port("DOWN", "Polling")], Limits(), False, [NOTE, OK], id="no cable"),
        pytest.param([port(), port("DOWN", "Disabled")], Limits(), False, [OK], id="disabled"),
        pytest.param(
            [port("DOWN", "LinkUp", layer="Ethernet")], Limits(), False, [NOTE], id="Ethernet"
        ),
        pytest.param([port()], Limits(locked=65536), False, [PROBLEM, OK], id="locked memory"),
        pytest.param([port()], Limits(), True, [NOTE, OK], id="switched off"),
        pytest.param(
            [port(), port(rate="200 Gb/sec (4X HDR)")], Limits(), False, [NOTE, OK], id="slower"
        ),
        pytest.param([], Limits(locked=65536), False, [], id="none"),
    ],
)
def test_rdma_ports_are_judged(ports, limits, disabled, expected):
    assert levels(checks_links.infiniband(ports, limits, disabled)) == expected


def test_rdma_ports_are_read_from_sys(tmp_path):
    base = tmp_path / "mlx5_0" / "ports" / "1"
    base.mkdir(parents=True)
    reported = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
    }
    for name, text in reported.items():
        (base / name).write_text(text + "\n")
    assert network.infiniband(str(tmp_path)) == (port(),)


# which interface NCCL and gloo take

LO = Interface("lo", ipv4="127.0.0.1")
ETH = Interface("eth0", ipv4="10.0.0.5", speed_mbps=100_000)
IB = Interface("ibp24s0", ipv4="10.1.0.5")
DOCKER = Interface("docker0", ipv4="172.17.0.1")
SIX = Interface("ens7", ipv6=True)
MANY = {"SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("found", "wanted", "names"),
    [
        pytest.param([LO, ETH, IB], "", "ibp24s0", id="InfiniBand first"),
        pytest.param([LO, DOCKER, ETH], "", "eth0", id="no docker"),
        pytest.param([LO, DOCKER], "", "docker0", id="docker"),
        pytest.param([LO], "", "lo", id="loopback at last"),
        pytest.param([LO, SIX, ETH], "", "eth0 ens7", id="IPv4 first"),
        pytest.param([LO, SIX], "", "ens7", id="IPv6"),
        pytest.param([LO, ETH, IB], "eth", "eth0", id="a prefix"),
        pytest.param([LO, ETH, IB], "^ib", "lo eth0", id="all but a prefix"),
        pytest.param(
            [LO, ETH, Interface("eth01", ipv4="10.2.0.5")], "=eth0", "eth0", id="a whole name"
        ),
        pytest.param(
            [LO, ETH, Interface("eth01", ipv4="10.2.0.5")],
            "eth0",
            "eth0 eth01",
            id="a prefix of two",
        ),
        pytest.param([LO, ETH, IB], "^=eth0,lo", "ibp24s0", id="all but whole names"),
        pytest.param([LO, ETH, IB], "ib,eth", "eth0 ibp24s0", id="by index"),
        pytest.param([LO, ETH], "ens", "", id="no match"),
        pytest.param([LO, ETH, IB], "e", "ibp24s0", id="one letter is ignored"),
        pytest.param([], "", "", id="none"),
    ],
)
def test_interfaces_are_chosen_as_in_nccls_source(found, wanted, names):
    chosen = checks_network.nccl_interfaces(found, wanted)
    assert " ".join(interface.name for interface in chosen) == names


@pytest.mark.parametrize(
    ("found", "environ", "level", "clause"),
    [
        pytest.param([LO, ETH], {}, OK, "NCCL takes eth0 (10.0.0.5, 100 Gb/s)", id="well"),
        pytest.param(
            [LO, ETH],
            {"NCCL_SOCKET_IFNAME": "ens3"},
            PROBLEM,
            "matches no interface",
            id="misspelled",
        ),
        pytest.param([LO, ETH._replace(carrier=False)], {}, PROBLEM, "it is down", id="no cable"),
        pytest.param([LO, ETH._replace(up=False)], {}, PROBLEM, "it is down", id="down"),
        pytest.param([LO], {}, OK, "NCCL takes lo", id="alone"),
        pytest.param([LO], MANY, PROBLEM, "no other machine", id="alone of many"),
        pytest.param([LO, DOCKER], MANY, PROBLEM, "containers only", id="docker of many"),
        pytest.param([LO, DOCKER], {}, OK, "docker0", id="docker"),
        pytest.param([Interface("eth0")], {}, PROBLEM, "no interface has an address", id="none"),
    ],
)
def test_the_interface_of_nccl_must_reach_other_machines(found, environ, level, clause):
    (reported,) = checks_network.nccl(Network("node1", interfaces=tuple(found)), environ)
    assert (reported.level, clause in reported.what) == (level, True), reported


def named(*addresses):
    return Network("node1", addresses, "" if addresses else "Name unknown", 0.0, (LO, ETH))


@pytest.mark.parametrize(
    ("known", "environ", "level", "clause"),
    [
        (named("10.0.0.5"), {}, OK, "gloo takes eth0"),
        (named("127.0.1.1"), {}, OK, "resolves to 127.0.1.1"),
        (named("127.0.1.1"), MANY, PROBLEM, "which other machines cannot reach"),
        (named(), {}, NOTE, "does not resolve"),
        (named(), MANY, PROBLEM, "does not resolve"),
        (named("10.9.9.9"), MANY, PROBLEM, "not to this machine"),
        (named("10.9.9.9", "10.0.0.5"), MANY, OK, "gloo takes eth0"),
        (named("127.0.1.1"), {**MANY, "GLOO_SOCKET_IFNAME": "eth0"}, OK, "gloo takes eth0"),
        (named("10.0.0.5"), {"GLOO_SOCKET_IFNAME": "eth7"}, PROBLEM, "names eth7"),
    ],
    ids=[
        "well",
        "Debian's line",
        "Debian's line of many",
        "unknown",
        "unknown of many",
        "another's",
        "the second one",
        "wished",
        "misspelled",
    ],
)
def test_gloo_listens_where_the_host_name_resolves_to(known, environ, level, clause):
    (reported,) = checks_network.gloo(known, environ)
    assert (reported.level, clause in reported.what) == (level, True), reported


@pytest.mark.parametrize(
    ("environ", "many"),
    [
        ({}, False),
        ({"SLURM_NNODES": "1"}, False),
        ({"SLURM_JOB_NUM_NODES": "4"}, True),
        ({"PET_NNODES": "2:4"}, True),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, True),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, False),
        ({"SLURM_NNODES": "x"}, False),
    ],
)
def test_a_job_of_several_machines_is_recognised_by_its_environment(environ, many):
    assert checks_network.many_nodes(environ) is many


def test_a_name_that_resolves_slowly_is_a_note():
    slow = named("10.0.0.5")._replace(seconds=11.0)
    assert levels(checks_network.name_service(slow)) == [NOTE]
    assert levels(checks_network.name_service(named("10.0.0.5"))) == []


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


def test_a_secret_in_the_holders_command_line_is_masked(tmp_path):
    (tmp_path / "net").mkdir()
    row = "0: 0100007F:733C 00000000:0000 0A 0:0 0:0 0 0 0 4242 1"
    (tmp_path / "net" / "tcp").write_text(f"  sl  local_address\n{row}\n")
    (tmp_path / "77" / "fd").mkdir(parents=True)
    (tmp_path / "77" / "fd" / "3").symlink_to("socket:[4242]")
    (tmp_path / "77" / "cmdline").write_bytes(b"train\0--api-key\0sk-1234567890abcdef\0")
    seen = network.port(0x733C, PLAIN, proc=str(tmp_path))
    assert (seen.pid, "sk-1234567890abcdef" in seen.command) == (77, False)
    assert seen.command.startswith("train --api-key")


def test_a_port_of_another_user_is_reported_without_its_process():
    (found,) = checks_network.ports(Network(ports=(Port(29500, taken=True),)))
    assert "somebody else" in found.what
    assert "29501" in found.fix
