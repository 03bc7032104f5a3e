"""Several hosts on this machine: namespaces of their own for network, name, processes and mounts.

A host is one process that reads a pipe; when the pipe closes, the kernel ends all of the host. Its
`eth0` is one end of a veth pair whose other end is at a bridge in a namespace of its own, so links
can be cut, slowed and made lossy. The hosts share all files, as over a network file system, but for
`/etc/hosts` and their users' homes, which the other hosts do not see.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from helpers import until
from runs import Run
from sandbox import text_of, write

LOSSY = Path(__file__).parents[1] / "programs" / "nodes" / "lossy_link.py"
SUMS = LOSSY.with_name("summing_job.py")
PORT = 29512  # of the rendezvous: the network is the hosts' own, and no port of it is taken
INIT = 'hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up; echo up; exec cat'


class Namespaces:
    """Namespaces that a process keeps; they go with it."""

    def __init__(self, name: str, names: Path, *kinds: str) -> None:
        command = ["unshare", "--net", *kinds, "sh", "-ec", INIT, "init", name, str(names)]
        self._keeper = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._keeper.stdout.readline() == b"up\n", name
        self.pid = self._first_process()

    def _first_process(self) -> int:
        """Return the pid of the process that reads the pipe: unshare's child where it forks."""
        children = text_of(Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children"))
        return int(children.split()[0]) if children.strip() else self._keeper.pid

    def end(self) -> None:
        """End every process in them."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for stream in (self._keeper.stdin, self._keeper.stdout):
            stream.close()
        self._keeper.wait()


class Host:
    """One host: its name, its address, what runs on it, and its link."""

    def __init__(self, number: int, count: int, bridge: Namespaces, folder: Path) -> None:
        self._others = [folder / f"h{n}" for n in range(1, count + 1) if n != number]
        self.name, self.address = f"h{number}", f"10.77.0.{number}"
        self.folder = folder / self.name
        self.folder.mkdir(exist_ok=True)
        self._bridge, self._number, self._hosts = bridge, number, folder / "hosts"
        self._runs: list[Run] = []
        self._lossy: subprocess.Popen[bytes] | None = None
        self._boot()

    def _boot(self) -> None:
        kinds = ("--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        self._own = Namespaces(self.name, self._hosts, *kinds)
        here, there = str(self._own.pid), str(self._bridge.pid)
        # After `kill` the kernel takes the old pair away, in its own time.
        old = ["nsenter", "-t", there, "--net", "ip", "link", "del", f"v{self._number}"]
        subprocess.run(old, capture_output=True, check=False)
        link = ["ip", "link", "add", "name", f"v{self._number}", "netns", there]
        # Its own address, as of a real host: the others know it for half a minute after a reboot.
        mac = f"02:77:00:00:00:{self._number:02x}"
        peer = ["peer", "name", "eth0", "address", mac, "netns", here]
        subprocess.run([*link, "type", "veth", *peer], check=True)
        at_bridge = ["nsenter", "-t", there, "--net", "ip", "link", "set", f"v{self._number}"]
        subprocess.run([*at_bridge, "master", "br0", "up"], check=True)
        self.do("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.do("ip", "link", "set", "eth0", "up")
        for other in self._others:
            other.mkdir(exist_ok=True)
            self.do("mount", "-t", "tmpfs", "none", str(other))

    def _inside(self) -> list[str]:
        return ["nsenter", "-t", str(self._own.pid), "--net", "--uts", "--mount", "--pid"]

    def do(self, *arguments: str) -> None:
        """Run a command on the host, as root, and wait for it."""
        subprocess.run([*self._inside(), *arguments], check=True)

    def ask(self, *arguments: str) -> int:
        """Run a command on the host and return its exit status."""
        done = subprocess.run([*self._inside(), *arguments], capture_output=True, check=False)
        return done.returncode

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command on the host."""
        return subprocess.Popen([*self._inside(), *arguments], **options)

    def start(self, *argv: str, **options: Any) -> Run:
        """Start saferun with these arguments; `command` and `env` are as in `runs.Run`."""
        command = options.pop("command", [sys.executable, "-m", "saferun"])
        inside = [*self._inside(), "env", "-C", str(self.folder)]
        environ = {"GLOO_SOCKET_IFNAME": "eth0", **options.pop("env", {})}
        run = Run(self.folder, list(argv), command=[*inside, *command], env=environ, **options)
        self._runs.append(run)
        return run

    def cut(self) -> None:
        """Cut its link; nothing that it sends or gets arrives, and nobody is told."""
        self._at_bridge("link", "set", self._port(), "nomaster")

    def heal(self) -> None:
        """Join its link again."""
        self._at_bridge("link", "set", self._port(), "master", "br0")

    def _port(self) -> str:
        """Return the name of the interface by which it is at the bridge."""
        return f"{'y' if self.is_lossy else 'v'}{self._number}"

    def _at_bridge(self, *arguments: str) -> None:
        inside = ["nsenter", "-t", str(self._bridge.pid), "--net", "ip"]
        subprocess.run([*inside, *arguments], check=True)

    def repeats(self) -> int:
        """Return how often its kernel has sent again what nobody acknowledged (TCPTimeouts)."""
        text = text_of(Path(f"/proc/{self._own.pid}/net/netstat"))
        names, values = (line.split() for line in text.splitlines() if line.startswith("TcpExt"))
        return int(values[names.index("TCPTimeouts")])

    def slow(self) -> None:
        """Let it send no more than 512 kbit/s; what is too much is lost."""
        limit = ["tbf", "rate", "512kbit", "burst", "16kbit", "latency", "100ms"]
        self.do("tc", "qdisc", "replace", "dev", "eth0", "root", *limit)

    def disturb(self, delay_ms: int = 20, loss_percent: float = 3) -> None:
        """Delay what it sends and gets, each way, and lose some of it, until `settle`.

        A program does it (lossy_link.py), between its link and the bridge: not every kernel has
        netem.
        """
        one, other = f"x{self._number}", f"y{self._number}"
        self._at_bridge("link", "add", "name", one, "type", "veth", "peer", "name", other)
        self._at_bridge("link", "set", other, "master", "br0", "up")
        self._at_bridge("link", "set", one, "up")
        self.cut()
        command = [sys.executable, str(LOSSY), f"v{self._number}", one]
        inside = ["nsenter", "-t", str(self._bridge.pid), "--net", *command]
        self._lossy = subprocess.Popen(
            [*inside, str(delay_ms), str(loss_percent)], stdout=subprocess.PIPE
        )
        assert self._lossy.stdout.readline() == b"up\n"

    @property
    def is_lossy(self) -> bool:
        """Whether `disturb` is in force."""
        return self._lossy is not None

    def settle(self) -> None:
        """End what `disturb` has begun."""
        self._end_lossy()
        self.heal()

    def _end_lossy(self) -> None:
        if self._lossy is None:
            return
        self._lossy.kill()
        self._lossy.wait()
        self._lossy.stdout.close()
        self._lossy = None
        self._at_bridge("link", "del", f"x{self._number}")

    def kill(self) -> None:
        """Kill all its processes at once; its kernel still says goodbye for them (FIN, RST)."""
        self._own.end()
        self._end_lossy()

    def lose_power(self) -> None:
        """End it without a goodbye: from one moment on nobody hears of it."""
        self.cut()
        self.kill()

    def boot(self) -> None:
        """Start it again after `kill` or `lose_power`."""
        self._boot()

    def close(self) -> None:
        """End all that it has started, and itself."""
        for run in self._runs:
            run.close()
        self._end_lossy()
        self._own.end()


def meeting(number: int = 0, nnodes: str = "2", backend: str = "c10d", at: str = "h1") -> list[str]:
    """Return the options by which hosts meet, with one rank on each.

    Args:
        number: of the host, from 0 on; a static rendezvous needs it.
        nnodes: how many hosts, as for torchrun.
        backend: "c10d" or "static".
        at: the host of the rendezvous.
    """
    ours = ["--profile=cpu", f"--nnodes={nnodes}", "--nproc-per-node=1"]
    if backend == "static":
        return [*ours, f"--node-rank={number}", f"--master-addr={at}", f"--master-port={PORT}"]
    return [*ours, "--rdzv-backend=c10d", f"--rdzv-endpoint={at}:{PORT}", "--rdzv-id=job"]


def add_up(place: Path, *fault: str, steps: int = 30, step_s: float = 0.2) -> list[str]:
    """Return a job that adds up numbers over gloo and saves below a directory.

    Args:
        place: the directory.
        fault: see summing_job.py.
        steps: how many.
        step_s: how long each takes at least.
    """
    return [str(SUMS), str(place / "out"), str(steps), str(step_s), *fault]


def saved(place: Path) -> None:
    """Wait until the job that adds up has saved something."""
    until((place / "out" / "saved").exists, "something saved")


def end_all(runs: list[Run]) -> list[int]:
    """Wait until all runs have ended; return their exit statuses."""
    return [run.end() for run in runs]


def clean(runs: list[Run]) -> None:
    """Fail where a process of a run still lives."""
    for run in runs:
        run.nothing_lives()


def alive(run: Run, part: str) -> int:
    """Wait for a process of a run with a text in its command line; return its pid."""
    found: int = until(lambda: (run.processes(part) or [0])[-1], part)
    return found


def locked(place: Path) -> list[str]:
    """Return the files below a directory on which some process holds a lock."""
    rows = [line.split() for line in text_of(Path("/proc/locks")).splitlines()]
    held = {word for row in rows for word in row if word.count(":") == 2}
    found = []
    for path in place.rglob("*"):
        with contextlib.suppress(OSError):
            facts = path.lstat()
            name = f"{os.major(facts.st_dev):02x}:{os.minor(facts.st_dev):02x}:{facts.st_ino}"
            found += [str(path)] if name in held else []
    return found


@contextlib.contextmanager
def standing(folder: Path, count: int) -> Iterator[list[Host]]:
    """Make hosts h1, h2, … (10.77.0.1, …) and end them and all that runs on them afterwards."""
    names = folder / "hosts"
    rows = [f"10.77.0.{number} h{number}" for number in range(1, count + 1)]
    write(names, "\n".join(["127.0.0.1 localhost", *rows, ""]))
    bridge = Namespaces("bridge", names, "--uts", "--mount")
    hosts: list[Host] = []
    try:
        inside = ["nsenter", "-t", str(bridge.pid), "--net", "ip", "link"]
        subprocess.run([*inside, "add", "br0", "type", "bridge"], check=True)
        subprocess.run([*inside, "set", "br0", "up"], check=True)
        for number in range(1, count + 1):
            hosts.append(Host(number, count, bridge, folder))
        yield hosts
    finally:
        for host in hosts:
            host.close()
        bridge.end()
