"""The mitigation table: which real failure each small program has, and what must come of it.

A row's program fails for the real reason, as far as this can be had on a CPU; gpu_table.py has the
rows that need a GPU. `NOT_HERE` names the kinds for which it cannot be had at all, with the
reason, and they are never counted as passed. ways.py runs a row; test_live.py asserts,
and benchmarks/mitigations.py prints what came out.
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
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
CAP_NET_BIND_SERVICE, PR_CAPBSET_DROP = 10, 24
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000  # linux/sched.h, linux/mount.h
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


def nothing(*options: str, args: tuple[str, ...] = (), **env: str) -> Around:
    """Return a set-up of options, arguments and variables only."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        yield Setup(options=options, args=args, env=env)

    return around


class Case(NamedTuple):
    """One row."""

    kind: str
    program: str
    mitigations: tuple[str, ...]  # that are added, in order; none where a retry is all it takes
    shows: str  # in the output at the end: it did its work, and what need not give way did not
    alone: str  # what is left as it was
    around: Around
    ranks: int = 2
    needs: Callable[[], bool] | None = None  # of the machine; its docstring is the reason
    healthy: Around = nothing()  # what stands around a run without the fault
    stops: bool = False  # no launcher can mitigate it: one attempt, and an explanation
    gpus: int = 0  # that it needs


# --- what stands around --------------------------------------------------------------------------


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


def earlier_cache(damaged: str = "") -> Around:
    """Return a set-up: an earlier run's kernels are cached, some cut short as by a full disk.

    Args:
        damaged: a pattern of the files that are cut.
    """

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        env = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        run_to_the_end([sys.executable, str(HERE / "inductor_cache_race.py")], env)
        found = list((folder / "inductor").rglob(damaged)) if damaged else []
        assert bool(found) == bool(damaged)
        for library in found:
            library.write_bytes(b"")
        yield Setup(env=env)

    return around


@contextlib.contextmanager
def no_compiler(folder: Path) -> Iterator[Setup]:
    """A PATH with torchrun and a shell, but no compiler."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("sh", "ls", "uname", "cat"):
        (tools / name).symlink_to(f"/bin/{name}")
    yield Setup(env={"PATH": f"{os.path.dirname(sys.executable)}:{tools}"})


def foreign_store(after_s: float) -> Around:
    """Return a set-up: another process, up some time after the job, hosts the rendezvous."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        port = free_port()
        with store(port, after_s):
            yield Setup(options=meeting_at(port))

    return around


@contextlib.contextmanager
def closed_rendezvous(folder: Path) -> Iterator[Setup]:
    """The store still holds the end of an earlier run of that id; in 15 s its host starts anew."""
    port = free_port()
    with store(port) as old:
        argv = ("--nproc-per-node=1", *meeting_at(port), str(HERE / "meet.py"))
        run_to_the_end([torchrun(), *argv], {})

        def again() -> None:
            if not over.wait(15):
                old.kill()
                old.wait()
                with store(port):
                    over.wait()

        over = threading.Event()
        host = threading.Thread(target=again)
        host.start()
        try:
            yield Setup(options=meeting_at(port))
        finally:
            over.set()
            host.join()


def meeting_at(port: int) -> tuple[str, ...]:
    """Return torchrun's options for a store that is somebody else's."""
    where = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=mitigations", "--rdzv-backend=c10d")
    return (*where, "--rdzv-conf=is_host=false,read_timeout=2")


def server(refusals: int) -> Around:
    """Return a set-up: a server that is out of service for the first requests."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        asked: list[str] = []

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.append(self.path)
                if len(asked) <= refusals:
                    self.send_error(503)
                    return
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"config")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as listening:
            thread = threading.Thread(target=listening.serve_forever)
            thread.start()
            try:
                yield Setup(args=(f"http://127.0.0.1:{listening.server_port}/config.json",))
            finally:
                listening.shutdown()
                thread.join()

    return around


def looked_up_file(replaced: bool) -> Around:
    """Return a set-up: a client knows the data by a handle; it may have been replaced since."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        data, kept = folder / "data", folder / "handle"
        data.write_text("old" if replaced else "new")
        argv = (str(data), str(kept))
        run_to_the_end([sys.executable, str(HERE / "stale_file_handle.py"), *argv], {})
        if replaced:
            data.unlink()
            data.write_text("new")
        yield Setup(args=argv)

    return around


def small_tmpfs(place: str, **env: str) -> Around:
    """Return a set-up: 1 MiB is all that the job has at a place; nobody else sees that."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        at = folder / place  # an absolute place stays as it is
        at.mkdir(exist_ok=True)

        def own_mounts() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.unshare(CLONE_NEWNS)
            failed = failed or libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
            failed = failed or libc.mount(b"tmpfs", bytes(at), b"tmpfs", 0, b"size=1m")
            if failed:
                raise OSError(ctypes.get_errno(), f"no own mount at {at}")

        yield Setup(args=(str(at),), env=env, preexec=own_mounts)

    return around


@contextlib.contextmanager
def roomy(folder: Path) -> Iterator[Setup]:
    """A directory with room."""
    yield Setup(args=(str(folder),))


def run_to_the_end(command: list[str], env: dict[str, str]) -> None:
    """Run what happened before the job."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SAFERUN", "PET_"))}
    environ = {**inherited, "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()


@contextlib.contextmanager
def store(port: int, after_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """Have a process that serves a store, some time after its start."""
    command = [sys.executable, "-c", STORE, str(port), str(after_s)]
    with subprocess.Popen(command) as serving:
        try:
            if not after_s:
                until_listening(port)
            yield serving
        finally:
            serving.kill()


def until_listening(port: int, limit_s: float = 300.0) -> None:
    """Wait until somebody listens on a port of this machine."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise AssertionError(f"nobody listens on {port}")


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
        "compiled ['cosine'",
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
        foreign_store(after_s=12.0),
        healthy=foreign_store(after_s=0.0),
    ),
    Case(
        "rendezvous-closed",
        "meet.py",
        (),
        "met 2 of 2",
        "the rendezvous that was asked for",
        closed_rendezvous,
        healthy=foreign_store(after_s=0.0),
    ),
    Case(
        "inductor-cache-race",
        "inductor_cache_race.py",
        ("fresh-compile-cache",),
        "compiled 1 graph",
        "it stays compiled",
        earlier_cache(damaged="*.main.so"),
        healthy=earlier_cache(),
    ),
    Case(
        "cpp-compile-error",
        "inductor_cache_race.py",
        ("fresh-compile-cache",),
        "compiled 1 graph",
        "it stays compiled",
        earlier_cache(damaged="*.so"),
        healthy=earlier_cache(),
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
        server(refusals=1),
        ranks=1,
        healthy=server(refusals=0),
    ),
    *(
        Case(
            f"study-storage-{way}",
            "study_storage.py",
            (),
            "searched",
            "every setting",
            nothing(args=(way,)),
            ranks=1,
            healthy=nothing(args=(way,)),
        )
        for way in ("locked", "full")
    ),
    Case(
        "stale-file-handle",
        "stale_file_handle.py",
        (),
        "read new",
        "every setting",
        looked_up_file(replaced=True),
        ranks=1,
        needs=is_root,
        healthy=looked_up_file(replaced=False),
    ),
    *(
        Case(kind, kind.replace("-", "_") + ".py", (), "met 2", "every setting", nothing())
        for kind in (
            "segfault",
            "bus-error",
            "abort-unknown",
            "ended-by-signal",
            "killed-from-outside",
            "peer-lost",
            "nccl-timeout",
        )
    ),
    *(
        Case(
            kind,
            "agent_asked_to_end.py",
            mitigations,
            "met 2",
            "every setting",
            nothing(args=(name,)),
            healthy=nothing(args=(name,)),
        )
        for kind, name, mitigations in (
            ("sigterm-preempted", "SIGTERM", ()),
            ("sighup-terminal-closed", "SIGHUP", ("new-session",)),
        )
    ),
    Case(
        "dataloader-shm-full",
        "dataloader_shm_full.py",
        (),
        "loaded 8 batches",
        "",
        small_tmpfs("/dev/shm"),
        ranks=1,
        needs=is_root,
        stops=True,
    ),
    Case(
        "disk-full",
        "disk_full.py",
        (),
        "saved",
        "",
        small_tmpfs("out"),
        ranks=1,
        needs=is_root,
        healthy=roomy,
        stops=True,
    ),
]


NCCL = "needs NCCL between GPUs"
NOT_HERE = {
    "cuda-oom-despite-free": "the driver refused memory that it called free; a limit that the "
    "script sets itself looks the same and is not mitigated",
    "tf-cudnn-init-failed": "needs TensorFlow and a CUDA GPU",
    "tf-nccl-failed": "needs TensorFlow: shown in tests/tensorflow",
    "tf-xla-failed": "needs TensorFlow: shown in tests/tensorflow",
    "cuda-devices-busy": "needs a GPU in exclusive mode, which not every machine may be put in",
    "study-storage-unreachable": "needs PostgreSQL: shown in tests/inject/test_optuna_postgres.py",
    "hang": "only the watch sees it, and no setting avoids it: tests/faults/test_hangs.py",
    "keeper-killed": "saferun's own failure: shown in tests/faults/test_keeper_loss.py",
    "node-lost": "needs hosts: shown in tests/nodes",
    "node-failed": "needs Slurm and a node that fails",
    "triton-compile-error": "needs a GPU and a fault of the compiler's own",
    "nccl-unhandled-cuda-error": NCCL + " and a driver that refuses one of its calls",
    "inductor-compile-worker-died": "on an H200 the program hung for 75 s with and without saferun "
    "where its compile workers were killed, and did not fail",
    "nccl-shm-failed": "where /dev/shm is too small for anything, two H200s lack NCCL's pool of "
    "33 MiB for its proxies first, and no variable does without that; the transport's own segment "
    "would need one that holds the pools and no more",
    "nccl-system-error": NCCL + " and a system call that fails without a word",
    "nccl-internal-error": NCCL + " and a fault without a word",
    "nccl-p2p-hang": NCCL + " that cannot reach each other's memory",
    "nccl-ib-error": NCCL + " and InfiniBand",
    "stale-rendezvous-store": "with torch 2.13 the next job met all the same in a store that had "
    "an earlier job's keys; the barrier that counts workers is off there, and where "
    "TORCH_DIST_INIT_BARRIER=1 asks for it, passes at once if an earlier job has completed it",
}
