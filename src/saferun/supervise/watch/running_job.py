"""The running attempt, as its watches need it, and a program that they start beside it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.diagnosis.silence import Longest
from saferun.model import Checkpoint, LaunchPlan
from saferun.supervise.records.record import Record
from saferun.system.command import REAP_S, Answer

_MOST_BYTES = 1 << 20  # most bytes read of a program's output


@dataclass(frozen=True, slots=True)
class RunningJob:
    """One running attempt."""

    plan: LaunchPlan
    number: int
    history: Sequence[AttemptOutcome]  # the attempts before it
    receipts: str | None  # the directory of the ranks' receipts
    record: Record
    longest: Longest  # longest silences of the run so far
    saved_before: Callable[[float], Checkpoint | None]  # the newest checkpoint from before a time
    say: Callable[[str], None]
    environ: Mapping[str, str]  # the user's environment
    keeper: int  # pid
    launcher: int  # pid


class BesideJob:
    """A program that runs beside the job, without waiting for it; its stdout is kept in memory.

    Args:
        argv: the program's command line.
        environ: the program's whole environment; None: ours.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._file = os.memfd_create("saferun-answer", os.MFD_CLOEXEC)
        self.process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(  # noqa: S603 - a tuple, no shell
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._file,
                stderr=subprocess.DEVNULL,
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        """Return whether the program has ended, or could not be started."""
        return self.process is None or self.process.poll() is not None

    def kill(self) -> bool:
        """Kill the program; return whether it was still running.

        The kernel may need time for it.
        """
        if self.process is None or self.process.poll() is not None:
            return False
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(REAP_S)
        return True

    def take(self) -> Answer:
        """End it; return how it ended and its stdout. Call it once."""
        self.kill()
        text = os.pread(self._file, _MOST_BYTES, 0).decode("utf-8", "replace")
        os.close(self._file)
        return Answer(text, "", self.process.returncode if self.process else None, "")
