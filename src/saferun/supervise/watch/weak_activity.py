"""Signs of work that cost more than a look at /proc, for silences that are nearly too long.

The bytes of the job's TCP connections (an upload from memory is in no counter of /proc), and the
use of its GPUs, as NVML tells it. The latter may hang on a failing GPU: a child asks it, and one
that does not answer at once is ended and not asked again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence

from saferun.diagnosis.silence import RATE
from saferun.gpu import nvml
from saferun.system import command as bounded
from saferun.system import tcp_bytes

EVERY_S = 60.0  # between two answers of NVML
ANSWER_S = 5.0  # the longest wait for one
_USED = 10  # percent; above, a GPU is in use
_MOST_BYTES = 1 << 20


class WeakActivity:
    """The signs of weak activity of one attempt.

    Args:
        environ: the user's, in which NVML is found.
        gpus: the UUIDs of the job's GPUs.
    """

    def __init__(self, environ: Mapping[str, str], gpus: Collection[str]) -> None:
        self._traffic = Traffic()
        self._gpus = GpuUse(environ, gpus)

    def seen(self, at_s: float, pids: Sequence[int]) -> bool:
        """Return whether there was such a sign since the last call.

        Args:
            at_s: now.
            pids: the job's.
        """
        moves = self._traffic.is_more(at_s, pids)
        return self._gpus.are_used(at_s) or moves


class Traffic:
    """What the TCP connections of some processes carry."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def is_more(self, at_s: float, pids: Sequence[int]) -> bool:
        """Return whether they have carried more than libraries' own exchanges since the last call.

        Args:
            at_s: now.
            pids: the processes.
        """
        count = tcp_bytes.moved(pids)
        last, self._last = self._last, None if count is None else (at_s, count)
        if last is None or count is None:
            return False
        return count - last[1] > RATE * (at_s - last[0])


class GpuUse:
    """What NVML says of the use of some GPUs; nobody waits for it.

    Args:
        environ: the user's, in which NVML is found.
        gpus: their UUIDs.
    """

    def __init__(self, environ: Mapping[str, str], gpus: Collection[str]) -> None:
        self._asks = bool(gpus)
        self._environ, self._gpus = environ, frozenset(gpus)
        self._asked: tuple[subprocess.Popen[bytes], int] | None = None
        self._asked_at_s = float("-inf")

    def are_used(self, at_s: float) -> bool:
        """Return whether an answer has come since the last call that says so; ask again in time."""
        used = self._answer(at_s) if self._asked else False
        if not self._asked and self._asks and at_s >= self._asked_at_s + EVERY_S:
            self._ask(at_s)
        return used

    def _ask(self, at_s: float) -> None:
        self._asked_at_s = at_s
        file = os.memfd_create("saferun-gpus", os.MFD_CLOEXEC)
        try:
            process = subprocess.Popen(  # noqa: S603 - our own program
                nvml.COMMAND,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.DEVNULL,
                env=dict(self._environ),
                start_new_session=True,
            )
        except OSError:
            os.close(file)
            self._asks = False
            return
        self._asked = process, file

    def _answer(self, at_s: float) -> bool:
        assert self._asked is not None
        process, file = self._asked
        if process.poll() is None:
            if at_s < self._asked_at_s + ANSWER_S:
                return False
            self._asks = False  # it hangs, and would again
            with contextlib.suppress(OSError):
                process.kill()
        text = os.pread(file, _MOST_BYTES, 0).decode("utf-8", "replace")
        os.close(file)
        self._asked = None
        answer = nvml.read(bounded.Answer(text, "", process.poll(), ""))
        self._asks = self._asks and bool(answer.program)
        cards = (answer.report.card(uuid) for uuid in self._gpus)
        return any((card.load().percent or 0) >= _USED for card in cards if card)
