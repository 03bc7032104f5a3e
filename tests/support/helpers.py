"""Jobs that misbehave, a process that supervises one attempt, and the means to watch both.

As a script this file is that process: `python helpers.py RESULT OPTIONS COMMAND...` runs the
command with `run_attempt(**json.loads(OPTIONS))` and writes how it ended to RESULT as JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tty
import uuid
from collections.abc import Callable, Iterator, Sequence
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


def all_is_over() -> bool:
    """Tell whether nothing that is watched lives any more, nor another child of ours."""
    if not watched or any(is_alive(process.pid) for process in watched):
        return False
    return not any(map(is_alive, children(os.getpid()))) and not any(map(living, watched.values()))


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


class Supervised:
    """A process that runs one attempt, and the processes of that attempt."""

    def __init__(self, folder: Path, command: Sequence[str], **options: Any) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        self.roster = folder / f"roster-{self.mark}"
        self._result = folder / f"result-{self.mark}"
        popen = options.pop("popen", {})
        wrap = options.pop("wrap", [sys.executable])
        plain, prefix = options.pop("plain", ()), options.pop("prefix", ())
        command_line = [
            *wrap,
            str(Path(__file__).resolve()),
            str(self._result),
            json.dumps(options),
        ]
        self.arguments = [*prefix, *(plain or command_line), *command]
        self.environment = self._environment(popen.pop("env", {}))
        self.process = self._start(popen)

    def _environment(self, extra: dict[str, str]) -> dict[str, str]:
        ours = {MARK: self.mark, "ROSTER": str(self.roster)}
        return {**os.environ, **ours, "PYTHONPATH": f"{SOURCES}:{PROGRAMS}", **extra}

    def _start(self, popen: dict[str, Any]) -> subprocess.Popen[bytes]:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(self.arguments, env=self.environment, **{**quiet, **popen})
        watched[process] = self.mark
        return process

    def members(self, role: str) -> list[int]:
        """Return the pids that entered the roster in a role."""
        lines = self.roster.read_text(encoding="utf-8").splitlines() if self.roster.exists() else []
        return [int(line.split()[1]) for line in lines if line.split()[0] == role]

    def arrived(self, **counts: int) -> None:
        """Wait until so many have entered the roster in each role."""
        until(
            lambda: all(len(self.members(role)) >= n for role, n in counts.items()),
            lambda: (
                counts,
                self.roster.read_text(encoding="utf-8") if self.roster.exists() else "no roster",
            ),
        )

    def pid(self, who: str) -> int:
        """Return the pid of "saferun", "keeper" or the first member in a role."""
        if who == "saferun":
            return self.process.pid
        if who == "keeper":
            names = living(self.mark).items()
            return next(pid for pid, name in names if name == "saferun-keeper")
        return self.members(who)[0]

    def kill(self, who: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(who), number)

    def ended(self) -> dict[str, Any]:
        """Wait for the end and return what run_attempt returned."""
        self.out, self.err = self.process.communicate(timeout=DEADLINE_S)
        assert self._result.exists(), self.err
        result: dict[str, Any] = json.loads(self._result.read_text(encoding="utf-8"))
        return result

    def nothing_lives(self, *but: int) -> None:
        """Wait until no process of the attempt lives, except those named."""
        until(lambda: set(living(self.mark)) <= set(but), lambda: f"{living(self.mark)} still live")
        until(lambda: but or not self.is_held(), "a process that forks and exits still lives")

    def is_held(self) -> bool:
        """Return whether a process lives that has inherited the lock which roster.py takes."""
        try:
            with open(f"{self.roster}.lives", encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:  # no such job was started
            return False
        except BlockingIOError:
            return True
        return False

    def clean(self) -> None:
        """End everything that carries the mark."""
        Path(f"{self.roster}.stop").touch()
        watched.pop(self.process, None)
        kill_all(self.mark)
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


@contextlib.contextmanager
def supervised(folder: Path, command: Sequence[str], **options: Any) -> Iterator[Supervised]:
    """Supervise a command; whatever is left of it is ended afterwards."""
    run = Supervised(folder, command, **options)
    try:
        yield run
    finally:
        run.clean()


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


def _made_ready(command: list[str], wanted: dict[str, Any]) -> Any:
    """Return a keeper with a warm agent, as `wanted` says.

    Keys: interpreter, flags; env (in which its environment differs); imports (wait until so many
    have entered the roster as "imported"); kill (end it before it is used); go (wait for a file).
    """
    from saferun.supervise.ready.keeper_pool import prepare, start_keeper
    from saferun.supervise.ready.warm_start import WarmStart

    env = {**os.environ, **wanted.get("env", {})}
    interpreter = wanted.get("interpreter", sys.executable)
    warm = WarmStart(tuple(command), env, interpreter, wanted.get("flags", ""))
    standby = prepare(start_keeper(), warm)
    roster = Path(os.environ["ROSTER"])
    count = wanted.get("imports", 0)
    until(
        lambda: (
            not count
            or (roster.exists() and roster.read_text(encoding="utf-8").count("imported") >= count)
        )
    )
    if wanted.get("kill"):
        pid = warm_agent_of(standby.pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: stat_of(pid)[0] == "Z")
    until(lambda: "go" not in wanted or Path(wanted["go"]).exists())
    return standby


def _main() -> None:
    from saferun.system.descriptors import plug_closed_descriptors

    plug_closed_descriptors()  # as saferun does, before an import opens a file
    from saferun.supervise.attempt.attempt_runner import run_attempt
    from saferun.supervise.attempt.attempt_values import AttemptSpec, Observer
    from saferun.supervise.ready import keeper_pool
    from saferun.supervise.ready.keeper_pool import start_keeper

    result, text, *command = sys.argv[1:]
    options = json.loads(text)
    keeper_pool._BOOT = keeper_pool._BOOT.replace("; k", "; " + options.pop("in_keeper", "") + "k")
    ahead, nexts = options.pop("warm_agent", None), options.pop("next_agent", None)
    standby, observer = None, Observer()
    if lock := options.pop("lock", None):
        held = os.open(lock, os.O_RDWR | os.O_CREAT)
        fcntl.flock(held, fcntl.LOCK_EX)
        standby = start_keeper([held])
    if ahead is not None:
        standby = _made_ready(command, ahead)
    if nexts is not None:
        kept: list[Any] = []

        class Preparing(Observer):
            def look(self) -> float:
                kept.append(_made_ready(command, nexts))
                return float("inf")

            def spared(self) -> list[int]:
                return [standby.pid for standby in kept]

        observer = Preparing()
    ended = run_attempt(AttemptSpec(command, os.environ, **options), observer, standby)
    facts = ended._asdict() | dict(zip(ended.report._fields, ended.report, strict=True))
    facts |= {"exit_code": ended.exit_code, "signal": ended.signal}
    text = json.dumps(facts, default=lambda value: value.decode("latin-1"))
    Path(result).with_suffix(".new").write_text(text, encoding="utf-8")
    Path(result).with_suffix(".new").rename(result)
    sys.exit(ended.exit_code)


if __name__ == "__main__":
    _main()
