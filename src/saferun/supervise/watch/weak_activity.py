"""Signs of work that cost more than a look at /proc, for silences that are nearly too long.

They are the bytes of the job's TCP connections (no counter in /proc shows an upload from memory),
and the use of its GPUs by NVML. NVML may hang on a failing GPU, so a child asks it; a child that
does not answer quickly is ended, and NVML is not asked again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from saferun.diagnosis.silence import RATE
from saferun.gpu import nvml
from saferun.system import tcp_bytes
from saferun.system.command import Child

EVERY_S = 60.0  # between two answers of NVML
ANSWER_S = 5.0  # longest wait for an answer
_USED = 10  # percent; above this a GPU is in use


class Traffic:
    """The traffic on the TCP connections of some processes."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None

    def is_more(self, at_s: float, pids: Sequence[int]) -> bool:
        """Return whether the traffic since the last call exceeds libraries' own exchanges.

        Args:
            at_s: the current time.
            pids: the processes.
        """
        count = tcp_bytes.moved(pids)
        last, self._last = self._last, None if count is None else (at_s, count)
        if last is None or count is None:
            return False
        return count - last[1] > RATE * (at_s - last[0])


class GpuUse:
    """NVML's data on the use of some GPUs, read without waiting.

    Args:
        environ: the user's environment, in which NVML is found.
        gpus: UUIDs of the GPUs.
    """

    def __init__(self, environ: Mapping[str, str], gpus: Collection[str]) -> None:
        self._asks = bool(gpus)
        self._environ, self._gpus = environ, frozenset(gpus)
        self._asked: Child | None = None
        self._asked_at_s = float("-inf")

    def are_used(self, at_s: float) -> bool:
        """Return whether an answer since the last call shows use; ask again when it is time."""
        used = self._asked is not None and self._answer(self._asked, at_s)
        if not self._asked and self._asks and at_s >= self._asked_at_s + EVERY_S:
            self._asked_at_s = at_s
            self._asked = Child(nvml.COMMAND, self._environ)
        return used

    def _answer(self, asked: Child, at_s: float) -> bool:
        if not asked.has_ended() and at_s < self._asked_at_s + ANSWER_S:
            return False
        hangs = asked.kill()
        answer = nvml.read(asked.take())
        self._asked = None
        self._asks = bool(answer.program) and not hangs  # otherwise it would be the same again
        cards = (answer.report.card(uuid) for uuid in self._gpus)
        return any((card.load().percent or 0) >= _USED for card in cards if card)
