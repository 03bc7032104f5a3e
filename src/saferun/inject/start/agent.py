"""The program of a warm process: import ahead, wait for a task, and become what it asks for.

That is the launcher, which has imported torch (and has forked the origin of its ranks), or a job of
plain python, which has imported what the process before it has. Loaded from its place in the job's
own Python, which may have no saferun: the standard library, Python >= 3.9. keeper/warm_agent.py is
the keeper's side of it.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import sys
import time

from . import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import NoReturn

    Task = tuple[list[str], list[str], dict[str, str], dict[str, str]]  # see `process.take_over`

_MODULE = "torch.distributed.run"
_MOST = b"most = %8d"  # in the text of `Boot`, which is as long each time


class Boot:
    """How this process was started.

    Args:
        fd: descriptor that its program was read from.
        text: that program, of keeper/warm_agent.py.
        at_start: the modules that any Python has before its program begins.
        most: how many of the listed modules to import.
    """

    def __init__(self, fd: int, text: bytes, at_start: frozenset[str], most: int) -> None:
        self.fd, self.text, self.at_start, self.most = fd, text, at_start, most


def wait(
    program: str,
    control: int,
    answer: int,
    files: Sequence[int],
    ranks: str | None,
    boot: Boot,
) -> Callable[[], object]:
    """Import ahead, wait for a task, and become what it starts.

    Args:
        program: the launcher's program, "-m" for `-m torch.distributed.run`; "" for plain python.
        control: descriptor that the task is read from, and then one byte to go on.
        answer: descriptor that one byte is written to when the task has been taken over, or why it
            must be given to a new process.
        files: what becomes descriptors 1 and 2.
        ranks: the file that lists what ranks import, "" for none, if ranks are to be forked; or
            what a job of plain python imports.
        boot: how this process was started.

    Returns:
        What executes the program; in a process that was forked as a rank, what executes that.
    """
    began = time.monotonic()
    for fd in (control, answer, boot.fd, *files):
        os.set_inheritable(fd, False)
    process.set_name(process.WAITS)
    if not program:
        return _wait_as_job(control, answer, files, ranks or "", boot, began)
    os.close(boot.fd)
    module = program == "-m"
    first_path = os.getcwd() if module else os.path.dirname(os.path.realpath(program))
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, first_path)
    origin, why = None, ""
    if ranks is None:
        __import__(_MODULE)
    else:
        from . import blank_ranks, imports

        inherited = [fd for fd in _descriptors() if fd > 2]
        why, read = _import_as_rank()
        if not why:
            origin, why, act = blank_ranks.make(
                imports.listed(ranks), inherited, boot.at_start, first_path, began, read
            )
            if act is not None:
                return act
    code = None if module else process.compiled(program)
    orig_argv, argv, env, born = _receive(control)
    process.take_over(orig_argv, argv, env, born)
    process.set_name(os.path.basename(os.fsencode((orig_argv if argv[0] == "-m" else argv)[0])))
    process.start_hooks(is_rank=False)
    _go_on(control, answer, files)
    if ranks is not None:
        blank_ranks.attach(origin, why)
    if module:
        process.forget_module(_MODULE)  # or runpy warns that it was imported already
        return process.run_module(_MODULE)
    return process.run_script(program, code)


def _go_on(control: int, answer: int, files: Sequence[int]) -> None:
    """Take the streams, answer that the task is taken over, and wait for the word to go on."""
    _take_streams(files)
    os.write(answer, b"r")
    if os.read(control, 1) != b"g":
        os._exit(1)
    os.close(control)
    os.close(answer)


def _wait_as_job(
    control: int,
    answer: int,
    files: Sequence[int],
    listed: str,
    boot: Boot,
    began: float,
) -> Callable[[], object]:
    """Import what the process before has listed, wait for a task, and become what it starts."""
    from .. import contract
    from . import imports

    born, keys = _environment_at_start(), _Keys(control)
    names, assigned = imports.listed(listed)
    names = names[: boot.most]
    reads, printed = imports.Reads(), imports.Printed()
    left, why = imports.import_all(names, printed, reads, forks=False)
    printed.stop()
    if why:  # the module may be half imported: only a new process is without it
        signal.pthread_sigmask(signal.SIG_BLOCK, keys.taken)
        _begin_again(born, (control, answer, *files), boot, len(left))
    os.close(boot.fd)
    imported = imports.Imported(born, reads.stop(), assigned, boot.at_start)
    process.load_hooks()
    seconds = time.monotonic() - began
    select.select([control], [], [])
    keys.give_back()
    _, argv, env, _ = _receive(control)
    if why := imported.refusal(argv[1:], env, os.getcwd()) or imported.changed():
        os.write(answer, why.encode("utf-8", "replace"))
        os._exit(1)
    process.set_name(os.path.basename(os.fsencode(argv[0])))
    env[contract.START] = f"ahead {len(names)} {seconds:.1f}"
    act = process.become(argv, env, born, None)
    _go_on(control, answer, files)
    return act


class _Keys:
    """Leaves what a terminal sends its processes to the job that runs, until there is a task.

    The keeper has started this process with the signals blocked.

    Args:
        control: descriptor that the task arrives on; from then on the signals are for us.
    """

    def __init__(self, control: int) -> None:
        self._control = control
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        self.taken = [n for n in blocked if signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._take) for number in self.taken}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)

    def _take(self, number: int, frame: object) -> None:
        if select.select([self._control], [], [], 0)[0]:
            # No KeyboardInterrupt, which the import of a module may catch.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def give_back(self) -> None:
        """Let the signals do what they do to any Python."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._take:  # else an import has taken it
                signal.signal(number, handler)


def _begin_again(env: dict[str, str], kept: Sequence[int], boot: Boot, most: int) -> NoReturn:
    """Execute this process's program once more, in the process that it is.

    Args:
        env: the whole environment.
        kept: descriptors that it needs.
        boot: how it was started.
        most: how many of the listed modules it imports then.
    """
    reading, writing = os.pipe()
    os.write(writing, boot.text.replace(_MOST % boot.most, _MOST % most))
    os.close(writing)
    os.dup2(reading, boot.fd)
    os.close(reading)
    for fd in kept:
        os.set_inheritable(fd, True)
    with open("/proc/self/cmdline", "rb") as file:
        argv = file.read().split(b"\0")[:-1]
    os.execve(sys.executable, argv, env)  # noqa: S606 - no shell is what we want


def _environment_at_start() -> dict[str, str]:
    with open("/proc/self/environ", "rb") as file:
        pairs = (os.fsdecode(word).partition("=") for word in file.read().split(b"\0"))
        return {name: value for name, _, value in pairs if name}


def _import_as_rank() -> tuple[str, set[str]]:
    """Import what the launcher imports.

    Returns:
        Why a rank's import would not be equal, "" for equal; the environment variables it reads.
    """
    from . import imports

    reads, printed = imports.Reads(), imports.Printed()
    try:
        __import__(_MODULE)
        why = imports.unequal(printed, reads.names)
    finally:
        reads.stop()
        if text := printed.stop():
            os.write(2, text)
    return (f"torch: {why}" if why else ""), reads.names


def _descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # the listing's own
            continue
        found.append(int(name))
    return found


def _receive(control: int) -> Task:
    """Return the task that arrives on the pipe; end where the keeper closes it without one."""
    head = _read(control, 8)
    body = _read(control, int.from_bytes(head, "little")) if head else b""
    if not body:
        os._exit(1)
    task: Task = marshal.loads(body)  # noqa: S302 - from our own keeper
    return task


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _take_streams(files: Sequence[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, fd in enumerate(files, 1):
        os.dup2(fd, number)
        os.close(fd)
    if os.isatty(1) and not sys.stdout.write_through:  # type: ignore[union-attr]  # a TextIOWrapper
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper
