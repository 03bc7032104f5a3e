"""Blank ranks: forks of a process with the ranks' imports, instead of new Pythons.

    agent (torchrun) -> origin of the ranks -> (a process that ends at once) -> rank

The agent forks the *origin* after its import of torch, before it makes threads or uses CUDA. The
origin imports the rest and waits on a socket. When torchrun starts a rank
(`SubprocessHandler._popen`, torch 2.3 to 2.13), the agent sends the command line, the environment
and the files to the origin. The origin forks twice, the process between ends, and the kernel makes
the rank a child of the agent, the nearest subreaper: torchrun waits for it, signals it and restarts
it like any rank.

If a fork could differ from a started rank, the rank is started as usual, and the agent reports the
reason once.
"""

from __future__ import annotations

import contextlib
import gc
import marshal
import os
import signal
import socket
import sys
import time

from ...base import prctl, proc
from .. import contract
from . import imports, process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .process import Act

_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_ADOPTED_S = 5.0  # for the kernel to give a rank to the agent: normally microseconds
_ANSWER_S = 60.0  # for the fork of a rank: normally milliseconds, more with remote files
_IMPORT_S = 240.0  # for all imports of the origin; a keeper waits 300 s for the agent


class Origin:
    """The agent's end of the process that ranks are forked from.

    Args:
        channel: socket to the origin.
        pid: the origin's pid.
        count: number of modules imported beyond torch's.
        seconds: duration of the imports, including torch's.
    """

    def __init__(self, channel: socket.socket, pid: int, count: int, seconds: float) -> None:
        self._channel, self._pid = channel, pid
        self._start = f"warm {count} {seconds:.1f}"

    def start(
        self, args: Sequence[str], env: dict[str, str], files: Sequence[int]
    ) -> tuple[int, str]:
        """Fork a rank; return its pid and "", or 0 and the reason for a usual start.

        Args:
            args: the rank's command line from torchrun.
            env: the rank's environment.
            files: the rank's descriptors 1 and 2.
        """
        if len(args) < 3 or args[0] != sys.executable or args[1] != "-u":
            return 0, f"{args[0]} is not the launcher's Python"
        prctl.become_subreaper()
        try:
            task = list(args), {**env, contract.START: self._start}, os.getcwd()
            _send(self._channel, task, files)
            reply = _receive(self._channel)[0]
        except OSError:  # or too late: a rank that comes now finds no agent, and ends
            reply = None
        finally:
            prctl.become_subreaper(on=False)
        return reply or (0, "the process that ranks are forked from has ended")

    def end(self) -> None:
        """End the origin, so that the agent has no children but its ranks."""
        self._channel.close()
        with contextlib.suppress(OSError):  # if SIGCHLD is ignored, it is already reaped
            os.kill(self._pid, signal.SIGKILL)  # it may still be importing
            os.waitpid(self._pid, 0)


def attach(origin: Origin | None, why: str) -> None:
    """Make torchrun's agent start its ranks from the origin; call it in the agent.

    Args:
        origin: the origin; None if there is none.
        why: the reason if it is None.
    """
    handler: Any = getattr(sys.modules.get(_HANDLER), "SubprocessHandler", None)
    original = getattr(handler, "_popen", None)
    if original is None:
        _say("this torch has no SubprocessHandler._popen")
        return
    from subprocess import Popen

    class Rank(Popen[bytes]):
        """torchrun's handle of a forked rank."""

        def __init__(self, args: Sequence[str], pid: int) -> None:
            self._pid = pid
            super().__init__(args)

        def _execute_child(self, *args: object) -> None:
            self.pid, self._child_created = self._pid, True

    def _popen(self: Any, args: Sequence[str], env: dict[str, str]) -> Any:
        nonlocal origin, why
        if origin is not None:
            outputs = ((1, self._stdout), (2, self._stderr))
            files = [fd if file is None else file.fileno() for fd, file in outputs]
            try:
                pid, why = origin.start(args, env, files)
                if pid:
                    return Rank(args, pid)
            except Exception as error:  # our own fault: the rank starts as usual
                why = f"{type(error).__name__}: {error}"
            origin.end()
            origin = None
            _say(why)
        return original(self, args, {**env, contract.START: f"spawn {why}"})

    handler._popen = _popen
    if why:
        _say(why)


def _say(reason: str) -> None:
    sys.stderr.write(f"saferun: start.ranks is warm, but ranks are started as usual: {reason}\n")


def make(
    launcher: str, listed: str, at_start: frozenset[str], first_path: str | None
) -> tuple[Origin | None, str, Act | None]:
    """Import the launcher and fork the ranks' origin; returns in the agent and in each rank.

    Args:
        launcher: the launcher's module in torch.
        listed: the file that lists the ranks' imports beyond torch, and the variables that they
            assign.
        at_start: modules that any Python has before its program begins.
        first_path: the entry of sys.path that stands for the agent's program; None for none.

    Returns:
        In the agent the origin, or None and the reason. In a rank, a function that executes it.
    """
    began, agent = time.monotonic(), os.getpid()
    theirs = [fd for fd in proc.descriptors("self") if fd > 2]  # no started rank gets these
    with imports.Seen() as seen:
        __import__(launcher)
        why = seen.unequal(forks=True)
    os.write(2, seen.printed)
    why = f"torch: {why}" if why else _unfit()
    imported = imports.Imported(os.environ, listed, at_start, seen.read)
    while not why:
        ours, channel = socket.socketpair()
        pid = os.fork()
        if not pid:
            for fd in (ours.detach(), *theirs):
                os.close(fd)
            return None, "", _be_origin(channel, agent, imported, first_path)
        channel.close()
        ours.settimeout(_IMPORT_S)
        try:
            answer = _receive(ours)[0]
        except OSError:
            answer = None
        left, unequal = answer or ([], "its origin has ended, or still imports")
        origin = Origin(ours, pid, len(imported.names), time.monotonic() - began)
        if not unequal:
            ours.settimeout(_ANSWER_S)
            return origin, "", None
        origin.end()
        imported.names, why = left, "" if imported.names else unequal
    return None, why, None


def _unfit() -> str:
    """Return why forks of this process would differ from started ranks; "" for no reason."""
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    if sys.gettrace() or sys.getprofile() or any(tools):
        return "a debugger or a profiler runs"
    for path in _site_files():
        with open(path, encoding="utf-8", errors="replace") as file:
            # Python executes these lines of a .pth file.
            lines = [line for line in file if path.endswith(".py") or line.startswith("import")]
        if any("RANK" in line for line in lines):
            return f"{path} reads RANK"
    return ""


def _site_files() -> list[str]:
    """Return the user's own files that every Python executes at its start."""
    modules = (sys.modules.get(name) for name in ("sitecustomize", "usercustomize"))
    paths = [getattr(module, "__file__", None) or process.OURS for module in modules]
    folders = [path for path in sys.path if path.endswith("-packages") and os.path.isdir(path)]
    files = [os.path.join(folder, name) for folder in folders for name in os.listdir(folder)]
    return [
        *(path for path in paths if not path.startswith(process.OURS)),
        *(path for path in files if path.endswith(".pth")),
    ]


def _be_origin(
    channel: socket.socket, agent: int, imported: imports.Imported, first_path: str | None
) -> Act:
    """Import, then fork a rank for each task; returns in a rank."""
    prctl.die_with_parent()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    name = proc.data("/proc/self/comm").strip()  # a rank's name: torch may set one at its import
    process.set_name(b"saferun-origin")
    left, why = imported.add(forks=True)
    _send(channel, (left, why))
    if why or os.getppid() != agent:
        os._exit(0)
    process.take_files([os.open(os.devnull, os.O_WRONLY) for _ in (1, 2)])
    process.load_hooks()
    gc.freeze()
    checked = ""
    while True:
        task, files = _receive(channel)
        if task is None:
            os._exit(0)
        args, env, directory = task
        restart = env.get("TORCHELASTIC_RESTART_COUNT", "")
        why = imported.refusal(args[2:], env, directory)
        if restart != checked and not why:
            why, checked = imported.changed(), restart
        if why:
            _send(channel, (0, why))
        elif _fork_rank():
            _be_rank(channel, agent)
            os.chdir(directory)
            process.take_files(files)
            process.set_name(name)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return process.become((args, 2, env), imported.born, first_path)
        for fd in files:
            os.close(fd)


def _fork_rank() -> bool:
    """Fork a rank whose parent will be the agent; return True in the rank."""
    between = os.fork()
    if between and os.waitpid(between, 0)[1]:
        os._exit(1)
    if not between and os.fork():
        os._exit(0)
    return not between


def _be_rank(channel: socket.socket, agent: int) -> None:
    """Become a child of the agent, as with `subprocess.Popen(start_new_session=True)`."""
    limit = time.monotonic() + _ADOPTED_S
    while os.getppid() != agent:
        if time.monotonic() > limit:
            os._exit(1)
        time.sleep(0.0002)  # the process between is still ending
    os.setsid()
    _send(channel, (os.getpid(), ""))
    channel.close()
    import threading

    getattr(threading.main_thread(), "_set_native_id", int)()  # private; multiprocessing does it


def _send(channel: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    socket.send_fds(channel, [b"m"], files)
    channel.sendall(marshal.dumps(message))


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and its descriptors; None and [] if the other end was closed."""
    _, files, _, _ = socket.recv_fds(channel, 1, 2)
    try:
        with channel.makefile("rb") as file:  # there is only one message at a time
            return marshal.load(file), files  # noqa: S302 - from our own fork
    except EOFError:
        return None, []
