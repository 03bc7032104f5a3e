"""Jobs that misbehave, and the means to watch processes."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src"
DEADLINE_S = 300  # for any event, on a machine that is busy with other work
MARK = "SAFERUN_TEST_MARK"

# No process has this pid: they are smaller (kernel/sysctl: pid_max).
NO_PID = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="utf-8"))
PROGRAMS = ROOT / "tests" / "programs" / "faults"
COMMON = "from roster import *\n"  # what the small jobs below have in common
RANK = COMMON + "kin(); join('rank'); stay()"
FAMILY = {"agent": 1, "rank": 2, "worker": 2, "grouped": 2, "daemon": 2}  # what `agent()` becomes


def agent(rank_code: str = RANK, count: int = 2) -> list[str]:
    """Return the command of a small agent whose ranks run `rank_code`."""
    return program("agent.py", rank_code, str(count))


def program(name: str, *arguments: str) -> list[str]:
    """Return the command of a program in tests/programs/faults."""
    return [sys.executable, str(PROGRAMS / name), *arguments]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def living(mark: str) -> dict[int, str]:
    """Return {pid: name} of the living processes that carry a mark in their environment.

    One that forks and exits all the time is missed: `Supervised.is_held` tells of such.
    """
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() not in Path(f"/proc/{name}/environ").read_bytes():
                continue
            if is_alive(int(name)):
                found[int(name)] = Path(f"/proc/{name}/comm").read_text(encoding="utf-8").strip()
    return found


def kill_all(mark: str, but: int = 0) -> None:
    """Kill the processes that carry a mark, but for one, until none lives that can be killed."""
    limit = time.monotonic() + 60
    while (found := set(living(mark)) - {but}) and time.monotonic() < limit:
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def has_signal(pid: int, fields: str, number: int) -> bool:
    """Tell whether a signal is in one of a process's sets, as /proc/PID/status names them."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    sets = re.findall(rf"^(?:{fields}):\s*(\w+)$", text, re.MULTILINE)
    return any(int(bits, 16) >> (number - 1) & 1 for bits in sets)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """Listen at a port, of IPv4 and, where there is one, of IPv6."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as holder:
        yield holder.getsockname()[1]


def stat_of(pid: int | str) -> list[str]:
    """Return what the kernel says of a process after its name: its state, its parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def is_alive(pid: int | str) -> bool:
    """Tell whether a process has not ended; a zombie has."""
    try:
        return stat_of(pid)[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def parent(pid: int) -> int:
    return int(stat_of(pid)[1])


# What the test has started and waits for, with the mark of all that it starts in turn.
watched: dict[subprocess.Popen[Any], str] = {}
apart: set[int] = set()  # pids of children that serve all tests


def all_is_over() -> bool:
    """Tell whether nothing that is watched lives any more, nor another child of ours."""
    if not watched or any(is_alive(process.pid) for process in watched):
        return False
    ours = set(children(os.getpid())) - apart
    return not any(map(is_alive, ours)) and not any(map(living, watched.values()))


def last_words() -> str:
    """Return how what is watched has ended, and what it wrote."""
    words = []
    for process in watched:
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):  # it was read to its end
            words += [text for text in process.communicate(timeout=5) if text]
        words.append(f"{process.args} has ended with status {process.poll()}")
    return "\n".join(map(str, words))


def until(condition: Callable[[], Any], what: object = "", limit_s: float = DEADLINE_S) -> Any:
    """Return the first true value of `condition()`.

    Fail when the time is over, and at once where nothing lives any more that could make it true.
    A condition that reads all of /proc takes no more than a fifth of a core.
    """
    limit = time.monotonic() + limit_s
    over = False
    while True:
        asked = time.monotonic()
        if value := condition():
            return value
        if over or asked > limit:
            text = what() if callable(what) else what
            after = last_words() if over else f"not within {limit_s} s"
            raise AssertionError(f"{text or condition}: {after}")
        over = all_is_over()
        time.sleep(max(0.005, 4 * (time.monotonic() - asked)))


def raw_pty() -> tuple[int, int]:
    """Return both ends of a terminal that passes every byte as it is."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    return ours, theirs


def children(pid: int) -> list[int]:
    """Return the pids of a process's children, whatever thread started them."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if parent(int(name)) == pid:
                found.append(int(name))
    return found


def warm_agent_of(keeper: int) -> int:
    """Return the pid of the warm agent that a keeper has waiting."""
    return int(until(lambda: [pid for pid in children(keeper) if _waits(pid)], "no warm agent")[0])


def awaits_its_task(agent: int) -> bool:
    """Whether a warm agent has imported torch and reads from its task's pipe (read: call 0)."""
    loaded = "libtorch_python" in Path(f"/proc/{agent}/maps").read_text(encoding="utf-8")
    return loaded and Path(f"/proc/{agent}/syscall").read_text(encoding="utf-8").split()[0] == "0"


def _waits(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == "saferun-warm"
    return False
