"""The program of a warm process: import ahead, wait for a task, and become its command.

The command is the launcher, which has imported torch (and has forked the origin of its ranks), or a
plain python job, which has imported what the previous process imported. This module is loaded by
path in the job's own Python, which may have no saferun: standard library, Python >= 3.9.
keeper/warm_agent.py is the keeper's side of it.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import select
import signal
import sys
import time

from ...base import proc
from . import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from .process import Act, Task

_PACKAGE, _MODULE = "torch.distributed", "torch.distributed.run"
_WAITS = b"saferun-warm"  # name of a waiting process


class Keeper:
    """The connection to this process's keeper.

    Args:
        boot: descriptor of the memory file from which this process's program was read. Numbers
            follow there, the last of which says how many of the listed modules to import.
        control: descriptor from which the task is read, and then one byte to continue.
        answer: descriptor for one byte when the task is taken over, or for the reason why a new
            process must get it.
        files: descriptors that become 1 and 2.
    """

    def __init__(self, boot: int, control: int, answer: int, files: Sequence[int]) -> None:
        self.boot, self.control, self.answer, self.files = boot, control, answer, files
        self.set_inheritable(False)

    def set_inheritable(self, value: bool) -> None:
        """Set whether a program executed here inherits the descriptors."""
        for fd in (self.boot, self.control, self.answer, *self.files):
            os.set_inheritable(fd, value)

    def task(self) -> Task:
        """Wait for the task and return it; exit if the keeper closes the pipe without one."""
        try:
            with open(self.control, "rb", closefd=False) as file:
                task: Task = marshal.load(file)  # noqa: S302 - from our own keeper
                return task
        except EOFError:
            os._exit(1)

    def go_on(self) -> None:
        """Take the streams, answer that the task is taken over, and wait for the next byte."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        process.take_files(self.files)
        if os.isatty(1) and not sys.stdout.write_through:  # type: ignore[union-attr]  # a TextIOWrapper
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper
        os.write(self.answer, b"r")
        if os.read(self.control, 1) != b"g":
            os._exit(1)
        os.close(self.control)
        os.close(self.answer)


def wait(program: str, ranks: str | None, at_start: frozenset[str], keeper: Keeper) -> Act:
    """Import ahead, wait for a task, and become the process that it starts.

    Args:
        program: the launcher's program; "-m" for `-m torch.distributed.run`; "" for plain python.
        ranks: the file that lists the imports of ranks, if ranks are forked ("" for no list), or of
            a plain python job.
        at_start: modules that any Python has before its program begins.
        keeper: the keeper of this process.

    Returns:
        A function that executes the program, or, in a process that was forked as a rank, the rank.
    """
    if not program:
        return _wait_as_job(ranks or "", at_start, keeper)
    os.close(keeper.boot)
    born = process.environment_at_start()
    first_path = process.add_first_path(program)
    origin, why = None, ""
    if ranks is not None:
        from . import blank_ranks

        origin, why, rank = blank_ranks.make(_MODULE, ranks, at_start, first_path)
        if rank is not None:
            return rank
    __import__(_MODULE)
    process.set_name(_WAITS)
    task = keeper.task()
    process.set_name(_name(program, task[0][0]))
    act = process.become(task, born, first_path, is_agent=True)
    keeper.go_on()
    if ranks is not None:
        blank_ranks.attach(origin, why)
    if program == "-m":
        # Nobody would have it now, and runpy warns about a module that was already imported.
        vars(sys.modules[_PACKAGE]).pop("run", None)
        sys.modules.pop(_MODULE)
    return act


def _name(program: str, python: str) -> bytes:
    """Return the name that the kernel gives a process for a launcher: of the last file executed.

    That is the program where its first line names Python itself, else Python (execve(2)).
    """
    first = b""
    if program != "-m":
        with contextlib.suppress(OSError), open(program, "rb") as file:
            first = file.readline(256)
    words = first[2:].split()
    is_direct = words and os.path.basename(words[0]).startswith(b"python")
    return os.path.basename(os.fsencode(program if is_direct else python))


def _wait_as_job(listed: str, at_start: frozenset[str], keeper: Keeper) -> Act:
    """Import the previous process's modules, wait for a task, and become what it starts."""
    from .. import contract
    from . import imports

    began, keys = time.monotonic(), _Keys(keeper.control)
    process.set_name(_WAITS)
    born = process.environment_at_start()
    imported = imports.Imported(born, listed, at_start)
    if counts := os.read(keeper.boot, 1 << 16).split():
        imported.names = imported.names[: int(counts[-1])]
    left, why = imported.add(forks=False)
    if why:  # the module may be half imported: only a new process is clean
        signal.pthread_sigmask(signal.SIG_BLOCK, keys.before)
        _begin_again(born, keeper, len(left))
    os.close(keeper.boot)
    process.load_hooks()
    seconds = time.monotonic() - began
    select.select([keeper.control], [], [])
    keys.give_back()
    argv, at, env = keeper.task()
    if why := imported.refusal(argv[at:], env, os.getcwd()) or imported.changed():
        os.write(keeper.answer, why.encode("utf-8", "replace"))
        os._exit(1)
    process.set_name(os.path.basename(os.fsencode(argv[0])))
    env[contract.START] = f"ahead {len(imported.names)} {seconds:.1f}"
    act = process.become((argv, at, env), born, None)
    keeper.go_on()
    return act


class _Keys:
    """Ignore signals from the terminal, which are for the running job, until there is a task.

    The keeper has started this process with the signals blocked.

    Args:
        control: descriptor on which the task arrives; from then on the signals are for us.
    """

    def __init__(self, control: int) -> None:
        self._control = control
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        taken = [number for number in blocked if signal.getsignal(number) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._take) for number in taken}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)

    def _take(self, number: int, frame: object) -> None:
        if select.select([self._control], [], [], 0)[0]:
            # The default action raises no KeyboardInterrupt, which a module's import might catch.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def give_back(self) -> None:
        """Restore the usual effect of the signals."""
        for number, handler in self.before.items():
            if signal.getsignal(number) == self._take:  # else an import has replaced the handler
                signal.signal(number, handler)


def _begin_again(env: dict[str, str], keeper: Keeper, most: int) -> NoReturn:
    """Execute this process's program once more in the same process.

    Args:
        env: the whole environment.
        keeper: the keeper of this process.
        most: how many of the listed modules it then imports.
    """
    os.write(keeper.boot, b"%d\n" % most)
    os.lseek(keeper.boot, 0, os.SEEK_SET)
    keeper.set_inheritable(True)
    os.execve(sys.executable, proc.command("self"), env)  # noqa: S606 - no shell is what we want
