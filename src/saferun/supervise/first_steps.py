"""Watch the first steps that the ranks of an attempt print: all have to begin at the same one.

A rank that has not found the checkpoint of the others begins at step 0 among them, and the run ends
well with wrong weights. The hook `init` compares what optimizers count; many count nothing, and a
job may run without hooks. Their output is in the keeper's memory, or in the files that the job
writes to, torchrun's of each rank among them (`--redirects`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from saferun.diagnosis import log_reader, progress
from saferun.diagnosis.evidence import Hang
from saferun.model import LaunchPlan
from saferun.supervise import live_output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.log_reader import Line
    from saferun.supervise.attempt import Ended

_EVERY_S = 3.0
_LOOKS = 40  # then the first steps are no longer in what is kept of the output
_KIND = "ranks-differ"
Look = Callable[[], "float | None"]


class FirstSteps:
    """One attempt.

    Args:
        plan: of the attempt.
        number: of the attempt. One that goes on from another is ended where its ranks differ; ranks
            of a first attempt may each have a part of the work.
        say: takes lines for people.
        look: what else is watched; see `Observer.look`.
    """

    def __init__(
        self, plan: LaunchPlan, number: int, say: Callable[[str], None], look: Look | None
    ) -> None:
        self._say, self._other = say, look
        agree = plan.settings.hooks.init.agree
        self._ends = agree == "error" and (number > 1 or plan.checkpoint is not None)
        self._left = 0 if agree == "off" or plan.launcher != "torchrun" else _LOOKS
        self._other_at_s = 0.0
        self._launcher = self._keeper = 0
        self._sizes: dict[tuple[int, int], int] = {}
        self.cause: Hang | None = None  # why the attempt was ended

    def started(self, keeper: int, launcher: int) -> None:
        """Note which command runs, and what its files hold from before."""
        self._keeper, self._launcher = keeper, launcher
        self._sizes = live_output.sizes(launcher)

    def at_once(self) -> None:
        """Have the other watch look next."""
        self._other_at_s = 0.0

    def look(self) -> float | None:
        """Look at the job; return the seconds until the next look, None to end it. Never raises."""
        now, delay_s = time.monotonic(), float("inf")
        if self._other is not None and now >= self._other_at_s:
            other_s = self._other()
            if other_s is None:
                return None
            self._other_at_s = now + other_s
        if self._other is not None:
            delay_s = self._other_at_s - now
        if self._left:
            self._left -= 1
            try:
                self._compare(self._lines())
            except Exception as error:
                self._left = 0
                self._say(f"first steps could not be compared ({type(error).__name__}: {error})")
            if self.cause is not None:
                return None
            delay_s = min(delay_s, _EVERY_S)
        return max(0.0, min(delay_s, 3600.0))

    def ended(self, ended: Ended) -> None:
        """Look at the beginning of the output of an attempt that is over."""
        if self._left and ended.ended_by == "job":
            self._ends = False
            self._compare(log_reader.read(ended.heads).lines)

    def _lines(self) -> list[Line]:
        outputs = [
            data for data, _ in live_output.outputs(self._keeper, self._launcher, self._sizes)
        ]
        lines = [*log_reader.read(outputs).lines]
        for rank, files in live_output.of_ranks(self._launcher).items():
            lines += [line._replace(rank=rank) for line in log_reader.read(files).lines]
        return lines

    def _compare(self, lines: list[Line] | tuple[Line, ...]) -> None:
        told = progress.apart(lines)
        if told is None:
            return
        self._left = 0
        if told and self._ends:
            line = f"ranks begin at different steps: {told}"
            self.cause = Hang(_KIND, None, line, "the steps that the ranks print")
        elif told:
            self._say(
                f"ranks begin at different steps: {told}. If they train one model, its weights "
                "become wrong: have all ranks load the same checkpoint"
            )
