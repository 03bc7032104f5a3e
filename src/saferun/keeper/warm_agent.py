"""A warm process, as its keeper sees it: it has imported ahead what the job will need.

Half of the time from a rank's death to the next attempt's first line is the new agent's own
`import torch`. A warm agent has it done. While one attempt runs, the keeper of the next one starts
the launcher's own Python, which does what the launcher's program would do first, the import, and
then blocks on a pipe (inject/start/agent.py). When it is handed its task it takes over the task's
arguments and environment and executes the launcher's program, the very file: messages, tracebacks,
exit status and signals are those of a launcher that was started then.

Standard library only: it runs in the keeper's process.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
from collections.abc import Sequence

from saferun.keeper import output_ends, protocol
from saferun.keeper.job import KEEPER_IGNORES, start_program

# What a terminal or a user sends to all of saferun's group: a job of plain python is born there.
_SHARED = [n for n in KEEPER_IGNORES if n not in (signal.SIGPIPE, signal.SIGXFSZ)]
# Short, so that the real command line fits over it; `posix` is built in. `-c` puts the working
# directory first on the path, and a module there must shadow nothing.
_START = "from posix import read;exec(read(%d,%d),{})"
_INJECT = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "inject")
_MARSHAL = 2  # a format that every Python reads and writes
_BOOT = """import sys
at_start = frozenset(sys.modules)
if sys.path[:1] == [""]:
    del sys.path[0]
package = sys.modules["_saferun_inject"] = type(sys)("_saferun_inject")
package.__path__ = [{inject!r}]
from _saferun_inject.start import agent, process
keeper = agent.Keeper{keeper!r}
error = None
try:
    try:
        agent.wait({program!r}, {ranks!r}, at_start, keeper)()
    except BaseException:
        len("")  # a signal that came meanwhile is raised at a call: here, not at the end
        raise
except BaseException as last:
    error = process.hide_frames(last)
if error is not None:
    raise error"""


class WarmAgent:
    """A process that imports torch and waits to become the job.

    Args:
        prepare: what it is made ready for.
        files: what the job will have as descriptors 1 and 2.

    Raises:
        OSError: it could not be started.
    """

    def __init__(self, prepare: protocol.Prepare, files: Sequence[int]) -> None:
        self._prepared = prepare
        self._unsent = memoryview(b"")
        self.files = [os.dup(fd) for fd in files]  # our own copies: a channel closes its
        control, self._control = os.pipe()
        os.set_blocking(self._control, False)  # its reader may be importing for a long time yet
        output_ends.enlarge(self._control)  # else a large environment goes through in pieces
        self.answers, answer = os.pipe()
        # What is printed during the import is nobody's before the hand-over: it waits in pipes.
        pipes = [os.pipe() for _ in range(1 if files[0] == files[1] else 2)]
        self._printed = [(reading, bytearray()) for reading, _ in pipes]
        # In memory, so that it can be read again (inject/start/agent.py).
        boot = os.memfd_create("saferun-boot")
        theirs = [control, answer, boot, *(writing for _, writing in pipes)]
        try:
            program = self._program(control, answer, boot)
            inherited = (control, answer, boot, *self.files)
            self.pid = start_program(program, [theirs[3], theirs[-1]], inherited)
        finally:
            for fd in theirs:
                os.close(fd)
        for fd, _ in self._printed:
            os.set_blocking(fd, False)

    def _program(self, control: int, answer: int, boot: int) -> protocol.Start:
        """Return what to execute; the code that it runs first lies ready in memory."""
        prepared = self._prepared
        keeper = boot, control, answer, self.files
        text = _BOOT.format(
            inject=_INJECT, program=prepared.program, ranks=prepared.ranks, keeper=keeper
        ).encode()
        os.pwrite(boot, text, 0)
        argv = [*prepared.python, "-c", _START % (boot, len(text))]
        # Space for the real command line, which is written over this one.
        missing = _size(prepared.argv) - _size(argv) - 1
        argv += [" " * missing] if missing > 0 else []
        blocked = () if prepared.own_group else _SHARED
        return protocol.Start(argv, prepared.env, prepared.own_group, prepared.ignored, blocked)

    def hand_over(self, start: protocol.Start) -> bool:
        """Send the task; return whether anybody reads it. Its answer arrives on `answers`.

        What does not fit into the pipe is sent by each `relay`.
        """
        python, program = self._prepared.python, self._prepared.program
        argv = [*python, *start.argv] if program not in ("", "-m") else start.argv
        return self._write(marshal.dumps((argv, len(python), start.env), _MARSHAL))

    def go(self) -> None:
        """Let it go on as the job."""
        self._write(b"g")

    def _write(self, data: bytes) -> bool:
        self._unsent = memoryview(bytes(self._unsent) + data)
        return self._push()

    def _push(self) -> bool:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._control, self._unsent) :]
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return True

    def relay(self) -> None:
        """Send on, and read what the import prints, so that no full pipe holds it up."""
        self._push()
        for fd, printed in self._printed:
            with contextlib.suppress(OSError):  # nothing more now
                while data := os.read(fd, 1 << 16):
                    printed += data

    def pass_output_on(self) -> None:
        """Write what the import printed to where the job's output goes."""
        self.relay()
        for (_, printed), file in zip(self._printed, self.files, strict=False):
            view = memoryview(printed)
            with contextlib.suppress(OSError):  # its reader went away
                while view:
                    view = view[os.write(file, view) :]

    def close(self) -> None:
        """Close all descriptors, which ends an agent that still waits."""
        for fd in (self._control, self.answers, *self.files, *(fd for fd, _ in self._printed)):
            os.close(fd)


def _size(argv: Sequence[str]) -> int:
    return sum(len(os.fsencode(word)) + 1 for word in argv)
