"""What stands around the programs of the mitigation table: ports, limits, caches, stores, disks."""

from __future__ import annotations

import contextlib
import ctypes
import http.server
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from helpers import free_port
from sandbox import clean, unquoted

HERE = Path(__file__).resolve().parent
CAP_NET_BIND_SERVICE, PR_CAPBSET_DROP = 10, 24
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000  # linux/sched.h, linux/mount.h
# "late": it serves once it is told that an attempt failed; else it then forgets the rendezvous.
STORE = """
import signal, sys
told = {signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, told)
import time, torch.distributed as dist
if sys.argv[2] == "late":
    signal.sigtimedwait(told, 600)
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
signal.sigtimedwait(told, 600)
store.delete_key("torch.rendezvous.mitigations")
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
        env = {"TORCHINDUCTOR_CACHE_DIR": unquoted(folder / "inductor")}
        run_to_the_end([sys.executable, str(HERE / "compile_one.py"), "cpu"], env)
        found = list((folder / "inductor").rglob(damaged)) if damaged else []
        assert bool(found) == bool(damaged)
        for library in found:
            library.write_bytes(b"")
        yield Setup(args=("cpu",), env=env)

    return around


@contextlib.contextmanager
def no_compiler(folder: Path) -> Iterator[Setup]:
    """A PATH with torchrun and a shell, but no compiler."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("sh", "ls", "uname", "cat"):
        (tools / name).symlink_to(f"/bin/{name}")
    yield Setup(args=("cpu",), env={"PATH": f"{os.path.dirname(sys.executable)}:{tools}"})


def foreign_store(when: str) -> Around:
    """Return a set-up: another process hosts the rendezvous, "late" or from the start."""

    @contextlib.contextmanager
    def around(folder: Path) -> Iterator[Setup]:
        port = free_port()
        with store(port, when) as serving, told_of_a_failure(serving, folder):
            yield Setup(options=meeting_at(port))

    return around


@contextlib.contextmanager
def closed_rendezvous(folder: Path) -> Iterator[Setup]:
    """The store still holds the end of an earlier run of that id until the first attempt failed."""
    port = free_port()
    with store(port) as serving:
        argv = ("--nproc-per-node=1", *meeting_at(port), str(HERE / "meet.py"))
        run_to_the_end([torchrun(), *argv], {})
        with told_of_a_failure(serving, folder):
            yield Setup(options=meeting_at(port))


@contextlib.contextmanager
def told_of_a_failure(process: subprocess.Popen[bytes], folder: Path) -> Iterator[None]:
    """Have a process told by SIGUSR1 that an attempt of the run below a folder has ended."""

    def tell() -> None:
        while not over.wait(0.2):
            if any(b'"ended"' in path.read_bytes() for path in folder.rglob("events.jsonl")):
                process.send_signal(signal.SIGUSR1)
                over.set()

    over = threading.Event()
    telling = threading.Thread(target=tell)
    telling.start()
    try:
        yield
    finally:
        over.set()
        telling.join()


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
        data.write_text("old" if replaced else "new", encoding="utf-8")
        argv = (str(data), str(kept))
        run_to_the_end([sys.executable, str(HERE / "stale_file_handle.py"), *argv], {})
        if replaced:
            data.unlink()
            data.write_text("new", encoding="utf-8")
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
    environ = {**clean(os.environ), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()


@contextlib.contextmanager
def store(port: int, when: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Have a process that serves a store."""
    with subprocess.Popen([sys.executable, "-c", STORE, str(port), when]) as serving:
        try:
            if not when:
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


def torchrun() -> str:
    """Return the torchrun beside this interpreter."""
    return os.path.join(os.path.dirname(sys.executable), "torchrun")
