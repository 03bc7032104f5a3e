"""The cure table: which real failure each small program has, and what must come of it.

A row's program fails for the real reason, as far as this can be had on a CPU; `NOT_HERE` names the
kinds for which it cannot, with the reason, and they are never counted as passed. ways.py runs a
row; test_cures_live.py asserts, and benchmarks/cures.py prints what came out.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
CAP_NET_BIND_SERVICE, PR_CAPBSET_DROP = 10, 24
STORE = """
import sys, time, torch.distributed as dist
time.sleep(float(sys.argv[2]))
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(600)
"""


class Setup(NamedTuple):
    """What stands around the program, the same for every way to run it."""

    options: tuple[str, ...] = ()  # torchrun's
    args: tuple[str, ...] = ()  # the program's
    env: Mapping[str, str] = {}
    preexec: Callable[[], Any] | None = None


Around = Callable[[Path], AbstractContextManager[Setup]]


class Case(NamedTuple):
    """One row."""

    kind: str
    program: str
    cures: tuple[str, ...]  # that are added, in order; none where a retry is all it takes
    shows: str  # in the output at the end: it did its work, and what need not give way did not
    alone: str  # what is left as it was
    around: Around
    ranks: int = 2
    needs: Callable[[], bool] | None = None  # of the machine; its docstring is the reason


# --- what stands around --------------------------------------------------------------------------


def nothing(*options: str, **env: str) -> Around:
    """Return a set-up of options and variables only."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        yield Setup(options=options, env=env)

    return around


@contextlib.contextmanager
def held_port(folder: Path) -> Iterator[Setup]:
    """Another process's socket listens where the ranks would meet."""
    with socket.socket() as holder:
        holder.bind(("0.0.0.0", 0))
        holder.listen()
        yield Setup(options=(f"--master-port={holder.getsockname()[1]}",))


@contextlib.contextmanager
def privileged_port(folder: Path) -> Iterator[Setup]:
    """The job may not bind ports below 1024, as for everybody but root."""

    def drop() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_CAPBSET_DROP, CAP_NET_BIND_SERVICE, 0, 0, 0)

    yield Setup(options=("--master-port=80",), preexec=drop)


@contextlib.contextmanager
def few_descriptors(folder: Path) -> Iterator[Setup]:
    """A soft limit that the batches which are kept reach; the hard one allows more."""

    def limit() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    yield Setup(preexec=limit)


@contextlib.contextmanager
def damaged_cache(folder: Path) -> Iterator[Setup]:
    """The kernels of an earlier run lie in the cache, cut short as by a full disk."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    program = str(HERE / "inductor_cache_race.py")
    run_to_the_end([sys.executable, program], env)
    kernels = list((folder / "inductor").rglob("*.main.so"))
    assert kernels
    for library in kernels:
        library.write_bytes(b"")
    yield Setup(env=env)


@contextlib.contextmanager
def no_compiler(folder: Path) -> Iterator[Setup]:
    """A PATH with torchrun and a shell, but no compiler."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("sh", "ls", "uname", "cat"):
        (tools / name).symlink_to(f"/bin/{name}")
    yield Setup(env={"PATH": f"{os.path.dirname(sys.executable)}:{tools}"})


@contextlib.contextmanager
def late_store(folder: Path) -> Iterator[Setup]:
    """The host of the rendezvous comes up 12 s after the job."""
    port = free_port()
    where = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=late", "--rdzv-backend=c10d")
    patience = "--rdzv-conf=is_host=false,read_timeout=2"
    with store(port, after_s=12.0):
        yield Setup(options=(*where, patience))


@contextlib.contextmanager
def busy_server(folder: Path) -> Iterator[Setup]:
    """A server that is out of service for the first request."""
    asked: list[str] = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            if len(asked) == 1:
                self.send_error(503)
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"config")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Setup(args=(f"http://127.0.0.1:{server.server_port}/config.json",))
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def replaced_file(folder: Path) -> Iterator[Setup]:
    """The data was replaced on the server since the client looked its handle up."""
    data, kept = folder / "data", folder / "handle"
    data.write_text("old")
    words = (str(data), str(kept))
    run_to_the_end([sys.executable, str(HERE / "stale_file_handle.py"), *words], {})
    data.unlink()
    data.write_text("new")
    yield Setup(args=words)


def run_to_the_end(command: list[str], env: dict[str, str]) -> None:
    """Run what happened before the job."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SAFERUN", "PET_"))}
    environ = {**inherited, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()


@contextlib.contextmanager
def store(port: int, after_s: float) -> Iterator[None]:
    """Have a process that serves a store, some time after its start."""
    command = [sys.executable, "-c", STORE, str(port), str(after_s)]
    with subprocess.Popen(command) as server:
        try:
            yield
        finally:
            server.kill()


def free_port() -> int:
    """Return a port that nobody holds now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def torchrun() -> str:
    """Return the torchrun beside this interpreter."""
    return os.path.join(os.path.dirname(sys.executable), "torchrun")


def is_root() -> bool:
    """it needs root"""
    return os.geteuid() == 0


def can_forbid_port_80() -> bool:
    """ports from 80 on are open to everybody here"""
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start") as file:
        return int(file.read()) > 80


# --- the rows ------------------------------------------------------------------------------------

CASES = [
    Case(
        "too-many-open-files",
        "too_many_open_files.py",
        ("more-open-files",),
        "kept 400 batches",
        "torch's way to share tensors",
        few_descriptors,
        ranks=1,
    ),
    Case(
        "dynamo-error",
        "dynamo_error.py",
        ("compile-fallback",),
        "compiled ['cosine']",
        "the other function stays compiled",
        nothing(),
        ranks=1,
    ),
    Case("port-in-use", "meet.py", ("free-port",), "met 2 of 2", "the port's holder", held_port),
    Case(
        "port-privileged",
        "meet.py",
        ("free-port",),
        "met 2 of 2",
        "the job's rights",
        privileged_port,
        needs=can_forbid_port_80,
    ),
    Case(
        "gloo-wrong-interface",
        "meet.py",
        ("gloo-socket-interface",),
        "met 2 of 2",
        "the backend",
        nothing(GLOO_SOCKET_IFNAME="eth97"),
    ),
    Case(
        "rendezvous-connect-failed",
        "meet.py",
        (),
        "met 2 of 2",
        "the rendezvous that was asked for",
        late_store,
    ),
    Case(
        "inductor-cache-race",
        "inductor_cache_race.py",
        ("fresh-compile-cache",),
        "compiled 1 graph",
        "it stays compiled",
        damaged_cache,
    ),
    Case(
        "compile-toolchain-missing",
        "compile_toolchain_missing.py",
        ("compile-off",),
        "sum 64",
        "the result",
        no_compiler,
        ranks=1,
    ),
    Case(
        "inductor-autotune-error",
        "inductor_autotune_error.py",
        ("autotune-off",),
        "compiled 1 graph",
        "it stays compiled",
        nothing(),
        ranks=1,
    ),
    Case(
        "ddp-optimizer-error",
        "ddp_optimizer_error.py",
        ("ddp-optimizer-off",),
        "compiled 1 graph",
        "it stays compiled",
        nothing(),
    ),
    Case(
        "dynamo-recompile-limit",
        "dynamo_recompile_limit.py",
        ("compile-off",),
        "sum 190",
        "the result",
        nothing(),
        ranks=1,
    ),
    Case(
        "hub-unavailable",
        "hub_unavailable.py",
        (),
        "fetched config",
        "every setting",
        busy_server,
        ranks=1,
    ),
    Case(
        "stale-file-handle",
        "stale_file_handle.py",
        (),
        "read new",
        "every setting",
        replaced_file,
        ranks=1,
        needs=is_root,
    ),
    Case("segfault", "segfault.py", (), "met 2", "every setting", nothing()),
    Case("bus-error", "bus_error.py", (), "met 2", "every setting", nothing()),
    Case("abort-unknown", "abort_unknown.py", (), "met 2", "every setting", nothing()),
    Case("killed-from-outside", "killed_from_outside.py", (), "met 2", "every setting", nothing()),
    Case("peer-lost", "peer_lost.py", (), "met 2", "every setting", nothing()),
    Case("nccl-timeout", "nccl_timeout.py", (), "met 2", "every setting", nothing()),
    Case("sigterm-preempted", "sigterm_preempted.py", (), "met 2", "every setting", nothing()),
    Case(
        "sighup-terminal-closed",
        "sighup_terminal_closed.py",
        ("new-session",),
        "met 2",
        "every setting",
        nothing(),
    ),
]


GPU = "needs a CUDA GPU"
NCCL = "needs NCCL, and so two GPUs"
NOT_HERE = {
    "cuda-oom-fragmentation": GPU,
    "cuda-oom-despite-free": GPU,
    "cuda-oom-other-process": GPU,
    "tf-cudnn-init-failed": "needs TensorFlow and a CUDA GPU",
    "cuda-illegal-access-sporadic": GPU,
    "cuda-launch-failure": GPU,
    "cuda-devices-busy": GPU + " in exclusive mode",
    "node-failed": "needs Slurm and a node that fails",
    "triton-launch-error": GPU,
    "triton-compile-error": GPU,
    "triton-out-of-resources": GPU,
    "triton-ptxas-arch": GPU + " newer than the packaged ptxas",
    "inductor-compile-worker-died": "needs Triton kernels: C++ ones are compiled in threads",
    "cudagraph-output-overwritten": GPU,
    "cudagraph-capture-failed": GPU,
    "nccl-unhandled-cuda-error": NCCL,
    "nccl-system-error": NCCL,
    "nccl-internal-error": NCCL,
    "nccl-shm-failed": NCCL,
    "nccl-p2p-hang": NCCL,
    "nccl-ib-error": NCCL + " and InfiniBand",
    "nccl-socket-interface": NCCL,
    "stale-rendezvous-store": "tried with a store that an earlier job had left its keys in; with "
    "torch 2.13 and gloo the next job met all the same",
    "rendezvous-closed": "needs several nodes, one of which comes late",
}
