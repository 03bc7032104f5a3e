"""A warm process from its keeper's view: it has already imported what the job will need.

Half of the time from a rank's death to the next attempt's first line is the new agent's own `import
torch`. A warm agent has done that before. While one attempt runs, the keeper of the next one starts
the launcher's own Python. That Python does the import, as the launcher's program would do first,
and then blocks on a pipe (inject/start/agent.py). When it gets its task, it adopts the task's
arguments and environment and executes the file of the launcher's program: messages, tracebacks,
exit status and signals are those of a launcher started at that time.

This module uses only the standard library, since it runs in the keeper's process.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import signal
from collections.abc import Sequence

from saferun.keeper import output_ends, protocol
from saferun.keeper.job import KEEPER_IGNORES, start_program

# Signals that a terminal or a user sends to all of saferun's group, in which a plain python job
# starts.
_SHARED = [n for n in KEEPER_IGNORES if n not in (signal.SIGPIPE, signal.SIGXFSZ)]
# It is short, so that the real command line fits over it; `posix` is built in. `-c` puts the
# working directory first on the path, and a module there must shadow nothing.
_START = "from posix import read;exec(read(%d,%d),{})"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_MARSHAL = 2  # a format that every Python reads and writes
_BOOT = """import sys
at_start = frozenset(sys.modules)
if sys.path[:1] == [""]:
    del sys.path[0]
package = sys.modules["_saferun"] = type(sys)("_saferun")
package.__path__ = [{package!r}]
from _saferun.inject.start import agent, process
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
        prepare: what the process is prepared for.
        files: the job's future descriptors 1 and 2.

    Raises:
        OSError: the process could not be started.
    """

    def __init__(self, prepare: protocol.Prepare, files: Sequence[int]) -> None:
        self._prepared = prepare
        self._unsent = memoryview(b"")
        self.files = [os.dup(fd) for fd in files]  # our own copies, since a channel closes its own
        control, self._control = os.pipe()
        os.set_blocking(self._control, False)  # its reader may be importing for a long time
        output_ends.enlarge(self._control)  # otherwise a large environment passes in pieces
        self.answers, answer = os.pipe()
        # Output during the import belongs to nobody before the hand-over: it waits in pipes.
        pipes = [os.pipe() for _ in range(1 if files[0] == files[1] else 2)]
        self._printed = [(reading, bytearray()) for reading, _ in pipes]
        # It is in memory, so that it can be read again (inject/start/agent.py).
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
        """Return the program to execute; the code that it runs first is ready in memory."""
        prepared = self._prepared
        keeper = boot, control, answer, self.files
        text = _BOOT.format(
            package=_PACKAGE, program=prepared.program, ranks=prepared.ranks, keeper=keeper
        ).encode()
        os.pwrite(boot, text, 0)
        argv = [*prepared.python, "-c", _START % (boot, len(text))]
        # This is space for the real command line, which is written over this one.
        missing = _size(prepared.argv) - _size(argv) - 1
        argv += [" " * missing] if missing > 0 else []
        blocked = () if prepared.own_group else _SHARED
        return protocol.Start(argv, prepared.env, prepared.own_group, prepared.ignored, blocked)

    def hand_over(self, start: protocol.Start) -> bool:
        """Send the task; return whether there is a reader. Its answer arrives on `answers`.

        Each `relay` sends more of what does not fit into the pipe.
        """
        python, program = self._prepared.python, self._prepared.program
        argv = [*python, *start.argv] if program not in ("", "-m") else start.argv
        return self._write(marshal.dumps((argv, len(python), start.env), _MARSHAL))

    def go(self) -> None:
        """Let the process continue as the job."""
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
        """Send more of the task, and read the import's output, so that no full pipe blocks it."""
        self._push()
        for fd, printed in self._printed:
            with contextlib.suppress(OSError):  # nothing more now
                while data := os.read(fd, 1 << 16):
                    printed += data

    def pass_output_on(self) -> None:
        """Write the import's output to the job's output."""
        self.relay()
        for (_, printed), file in zip(self._printed, self.files, strict=False):
            view = memoryview(printed)
            with contextlib.suppress(OSError):  # the reader has gone
                while view:
                    view = view[os.write(file, view) :]

    def close(self) -> None:
        """Close all descriptors, which ends an agent that is still waiting."""
        for fd in (self._control, self.answers, *self.files, *(fd for fd, _ in self._printed)):
            os.close(fd)


def _size(argv: Sequence[str]) -> int:
    return sum(len(os.fsencode(word)) + 1 for word in argv)
