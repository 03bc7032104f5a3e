"""Blank ranks: forks of a process that has imported what ranks import, in place of new Pythons.

    agent (torchrun) -> origin of the ranks -> (a process that ends at once) -> rank

The agent forks the *origin* once it has imported torch, before it makes threads and asks CUDA for
anything. The origin imports the rest and waits on a socket. When torchrun would start a rank
(`SubprocessHandler._popen`, torch 2.3 to 2.13) the agent sends it the command line, the
environment and the files; it forks twice, the process between ends, and the kernel makes the rank a
child of the agent, the nearest subreaper: torchrun waits for it, signals it and restarts it as it
does with any rank.

What cannot be equal to a rank that was started is started, and the agent says why, once.
"""

from __future__ import annotations

import gc
import marshal
import os
import signal
import socket
import sys
import time

from .. import contract
from . import imports, process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Sequence
    from typing import Any

    Act = Callable[[], object]
    Request = tuple[list[str], dict[str, str], str, str]  # argv, environment, directory, restart
    Reply = tuple[int, str]  # the rank's pid, or 0 and the reason

WARM = "warm"
_HANDLER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
_SET_PDEATHSIG, _SET_SUBREAPER = 1, 36  # linux/prctl.h
_MARSHAL = 2  # a format that every Python reads and writes
_ADOPTED_S = 5.0  # until the kernel has given a rank to the agent: microseconds
_ANSWER_S = 60.0  # until the origin has forked a rank: milliseconds, more where files are remote
_IMPORT_S = 240.0  # until it has imported all; a keeper waits 300 s for the agent


class NotEqualError(Exception):
    """Ranks must be started as usual; the message says why."""


class Origin:
    """The agent's end of the process that ranks are forked from.

    Args:
        channel: to it.
        count: how many modules it has imported beyond torch's.
        seconds: that the imports took, torch's included.
    """

    def __init__(self, channel: socket.socket, count: int, seconds: float) -> None:
        self._channel = channel
        self._start = f"{WARM} {count} {seconds:.1f}"

    def start(self, args: Sequence[str], env: dict[str, str], files: Sequence[int]) -> int:
        """Fork a rank; return its pid.

        Args:
            args: its command line, as torchrun makes it.
            env: its environment.
            files: its descriptors 1 and 2.

        Raises:
            NotEqualError: it must be started as usual.
        """
        if len(args) < 3 or args[0] != sys.executable or args[1] != "-u":
            raise NotEqualError(f"{args[0]} is not the launcher's Python")
        restart = env.get("TORCHELASTIC_RESTART_COUNT", "")
        request: Request = (list(args), {**env, contract.START: self._start}, os.getcwd(), restart)
        prctl(_SET_SUBREAPER, 1)
        try:
            _send(self._channel, request, files)
            reply: Reply | None = _receive(self._channel)[0]
        except OSError:  # too late too: a rank that comes now finds that it has no agent, and ends
            self._channel.close()
            reply = None
        finally:
            prctl(_SET_SUBREAPER, 0)
        pid, why = reply or (0, "the process that ranks are forked from has ended")
        if why:
            raise NotEqualError(why)
        return pid


def attach(origin: Origin | None, why: str) -> None:
    """Have torchrun's agent start its ranks here; call it in the agent.

    Args:
        origin: None where there is none.
        why: it is None.
    """
    handler: Any = getattr(sys.modules.get(_HANDLER), "SubprocessHandler", None)
    original = getattr(handler, "_popen", None)
    if original is None:
        _say("this torch has no SubprocessHandler._popen")
        return
    from subprocess import Popen

    said: list[str] = []

    class Rank(Popen[bytes]):
        """What torchrun holds of a rank that was forked."""

        def __init__(self, args: Sequence[str], pid: int) -> None:
            self._pid = pid
            super().__init__(args)

        def _execute_child(self, *args: object) -> None:
            self.pid, self._child_created = self._pid, True

    def _popen(self: Any, args: Sequence[str], env: dict[str, str]) -> Any:
        reason = why
        if origin is not None and not said:
            files = [
                fd if file is None else file.fileno()
                for fd, file in ((1, self._stdout), (2, self._stderr))
            ]
            try:
                return Rank(args, origin.start(args, env, files))
            except NotEqualError as error:
                reason = str(error)
            except Exception as error:  # a fault of ours: the rank starts as usual
                reason = f"{type(error).__name__}: {error}"
        if not said:
            said.append(reason)
            _say(reason)
        return original(self, args, {**env, contract.START: f"spawn {said[0]}"})

    handler._popen = _popen


def _say(reason: str) -> None:
    line = f"saferun: start.ranks is warm, but ranks are started as usual: {reason}\n"
    sys.stderr.write(line)


def make(
    listed: tuple[list[str], set[str]],
    close: Sequence[int],
    at_start: Container[str],
    first_path: str,
    began: float,
    read: set[str],
) -> tuple[Origin | None, str, Act | None]:
    """Fork the origin of the ranks; returns in the agent, and in each rank.

    Args:
        listed: the modules that ranks import beyond torch, and the variables that they assign.
        close: descriptors that a rank started now would not have.
        at_start: the modules that any Python has before its program begins.
        first_path: the entry of sys.path that stands for the agent's program.
        began: when the import of torch did, in seconds (time.monotonic).
        read: the environment variables that the import of torch has read.

    Returns:
        In the agent the origin, or None and why there is none. In a rank, what executes it.
    """
    names, assigned = listed
    while True:
        if why := _unfit():
            return None, why, None
        ours, theirs = socket.socketpair()
        agent = os.getpid()
        pid = os.fork()
        if not pid:
            ours.close()
            for fd in close:
                os.close(fd)
            return (
                None,
                "",
                _be_origin(theirs, agent, (names, assigned), at_start, first_path, read),
            )
        theirs.close()
        ours.settimeout(_IMPORT_S)
        try:
            answer = _receive(ours)[0]
        except OSError:
            answer = None
        left, why = answer or ([], "its origin has ended, or still imports")
        if not why:
            ours.settimeout(_ANSWER_S)
            return Origin(ours, len(names), time.monotonic() - began), "", None
        ours.close()
        os.kill(pid, signal.SIGKILL)  # it may still import
        os.waitpid(pid, 0)
        if not names:
            return None, why, None
        names = left


def _unfit() -> str:
    """Return why forks of this process would not be what started ranks are; "" for no reason."""
    if imports.threads():
        return "torch starts threads when it is imported"
    if imports.open_gpus():
        return "torch opens a GPU when it is imported"
    monitoring: Any = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = [monitoring.get_tool(number) for number in range(6)] if monitoring else []
    if sys.gettrace() or sys.getprofile() or any(tools):
        return "a debugger or a profiler runs"
    return next((f"{path} reads RANK" for path, text in _site_code() if "RANK" in text), "")


def _site_code() -> Iterator[tuple[str, str]]:
    """Yield the path and the text of what every Python of the user's executes at its start."""
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    for name in ("sitecustomize", "usercustomize"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and not path.startswith(ours):
            with open(path, encoding="utf-8", errors="replace") as file:
                yield path, file.read()
    for folder in sys.path:
        if folder.endswith("-packages") and os.path.isdir(folder):
            for name in os.listdir(folder):
                if name.endswith(".pth"):
                    path = os.path.join(folder, name)
                    with open(path, encoding="utf-8", errors="replace") as file:
                        yield path, "".join(line for line in file if line.startswith("import"))


def _be_origin(
    channel: socket.socket,
    agent: int,
    listed: tuple[list[str], set[str]],
    at_start: Container[str],
    first_path: str,
    read: set[str],
) -> Act:
    """Import, then fork a rank for each request; returns in a rank."""
    prctl(_SET_PDEATHSIG, signal.SIGKILL)
    born = dict(os.environ)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    name = _name_of_rank()
    process.set_name(b"saferun-origin")
    reads, printed = imports.Reads(), imports.Printed()
    left, why = imports.import_all(listed[0], printed, reads, forks=True)
    printed.stop()
    _send(channel, (left, why), ())
    if why or os.getppid() != agent:
        os._exit(0)
    imported = imports.Imported(born, read | reads.stop(), listed[1], at_start)
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
    process.load_hooks()
    gc.freeze()
    checked = ""
    while True:
        request, files = _receive(channel)
        if request is None:
            os._exit(0)
        args, env, directory, restart = request
        found = imported.refusal(args[2:], env, directory)
        if restart != checked and not found:
            found, checked = imported.changed(), restart
        pid = 0 if found else _fork_rank()
        if pid is None:  # the rank
            channel.close()
            _be_rank(agent, mask, files, directory, name)
            return process.become(args, env, born, first_path)
        for fd in files:
            os.close(fd)
        _send(channel, (pid, found), ())


def _fork_rank() -> int | None:
    """Fork a rank that the agent will be the parent of; return its pid, None in the rank."""
    reading, writing = os.pipe()
    between = os.fork()
    if not between:
        pid = os.fork()
        if not pid:
            os.close(reading)
            os.close(writing)
            return None
        os.write(writing, b"%d" % pid)
        os._exit(0)
    os.close(writing)
    number = os.read(reading, 32)
    os.close(reading)
    os.waitpid(between, 0)
    return int(number)


def _be_rank(
    agent: int, mask: Iterable[int], files: Sequence[int], directory: str, name: bytes
) -> None:
    """Become a process as `subprocess.Popen(start_new_session=True)` makes one."""
    limit = time.monotonic() + _ADOPTED_S
    while os.getppid() != agent:
        if time.monotonic() > limit:
            os._exit(1)
        time.sleep(0.0002)  # the process between is ending
    os.setsid()
    for number, fd in enumerate(files, 1):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(directory)
    process.set_name(name)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    import threading

    main = threading.main_thread()
    if hasattr(main, "_set_native_id"):
        main._set_native_id()


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    import ctypes

    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def _send(channel: socket.socket, message: Any, files: Sequence[int]) -> None:
    data = marshal.dumps(message, _MARSHAL)
    head = len(data).to_bytes(8, "little")
    if files:
        socket.send_fds(channel, [head], files)
    else:
        channel.sendall(head)
    channel.sendall(data)


def _receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """Return a message and its descriptors; None and [] where the other end was closed."""
    head, files, _, _ = socket.recv_fds(channel, 8, 2)
    size, data = int.from_bytes(head, "little"), b""
    while len(data) < size:
        piece = channel.recv(size - len(data))
        if not piece:
            return None, []
        data += piece
    return (marshal.loads(data) if data else None), files  # noqa: S302 - from our own fork


def _name_of_rank() -> bytes:
    """Return the name that a started rank has once it has imported torch, which may set one."""
    with open("/proc/self/comm", "rb") as file:
        name = file.read().strip()
    return os.path.basename(os.fsencode(sys.executable)) if name == process.WAITS else name
