"""Watch the first steps that the ranks of an attempt print: all have to begin at the same one.

A rank that has not found the checkpoint of the others begins at step 0 among them, and the run ends
well with wrong weights. The hook `init` compares what optimizers count; many count nothing, and a
job may run without hooks. Their output is in the keeper's memory, or in the files that the job
writes to, torchrun's of each rank among them (`--redirects`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.reading.log_lines import Line
from saferun.model import LaunchPlan
from saferun.supervise.attempt.attempt_values import Ended
from saferun.supervise.watch import live_output
from saferun.supervise.watch.hang_watch import HangWatch

_EVERY_S = 3.0
_LOOKS = 40  # then the first steps are no longer in what is kept of the output
_KIND = "ranks-differ"


class FirstSteps:
    """Watches the first steps of one attempt.

    Args:
        plan: the attempt's.
        number: the attempt's. One that goes on from another is ended where its ranks differ; ranks
            of a first attempt may each have a part of the work.
        say: takes lines for people.
        hang_watch: checks the job in its own time; None for none.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        number: int,
        say: Callable[[str], None],
        hang_watch: HangWatch | None,
    ) -> None:
        self._say, self._hang_watch = say, hang_watch
        agree = plan.settings.hooks.init.agree
        self._ends = agree == "error" and (number > 1 or plan.checkpoint is not None)
        self._left = 0 if agree == "off" or plan.launcher != "torchrun" else _LOOKS
        self._hang_check_s = 0.0
        self._launcher = self._keeper = 0
        self._sizes: dict[tuple[int, int], int] = {}
        self._apart: Hang | None = None
        self.takes_questions = hang_watch is not None

    @property
    def cause(self) -> Hang | None:
        """Why the attempt was ended."""
        return self._apart or (self._hang_watch.cause if self._hang_watch else None)

    def started(self, keeper: int, launcher: int) -> None:
        """Note which command runs, and what its files hold from before."""
        if self._hang_watch:
            self._hang_watch.started(launcher)
        self._keeper, self._launcher = keeper, launcher
        self._sizes = live_output.sizes(launcher)

    def ask(self) -> None:
        """Have the next look followed by a report of where the ranks are."""
        if self._hang_watch:
            self._hang_watch.ask()
        self._hang_check_s = 0.0

    def check_job(self) -> float | None:
        """Return the seconds until the next check of the job, None to end it. Never raises."""
        now, delay_s = time.monotonic(), float("inf")
        if self._hang_watch:
            if now >= self._hang_check_s:
                wait_s = self._hang_watch.check_job()
                if wait_s is None:
                    return None
                self._hang_check_s = now + wait_s
            delay_s = self._hang_check_s - now
        if self._left:
            self._left -= 1
            try:
                self._compare(self._lines())
            except Exception as error:
                self._left = 0
                self._say(f"first steps could not be compared ({type(error).__name__}: {error})")
            if self._apart is not None:
                return None
            delay_s = min(delay_s, _EVERY_S)
        return max(0.0, min(delay_s, 3600.0))

    def ended(self, ended: Ended) -> None:
        """Look at the beginning of the output of an attempt that is over."""
        if self._left and ended.ended_by == "job":
            self._ends = False
            self._compare(_lines_of(ended.heads))

    def _lines(self) -> list[Line]:
        outputs = [
            data for data, _ in live_output.outputs(self._keeper, self._launcher, self._sizes)
        ]
        lines = [*_lines_of(outputs)]
        for rank, files in live_output.of_ranks(self._launcher).items():
            lines += [line._replace(rank=rank) for line in _lines_of(files)]
        return lines

    def _compare(self, lines: list[Line] | tuple[Line, ...]) -> None:
        from saferun.diagnosis.reading import progress  # only a job that runs needs it

        found = progress.apart(lines)
        if found is None:
            return
        self._left = 0
        line = f"ranks begin at different steps: {found.difference}"
        if found.is_far and self._ends:
            self._apart = Hang(_KIND, None, line, "the steps that the ranks print")
        elif found.difference:
            self._say(
                f"{line}. If they train one model, its weights become wrong: have all ranks load "
                "the same checkpoint"
            )


def _lines_of(outputs: Sequence[bytes]) -> tuple[Line, ...]:
    from saferun.diagnosis.reading import log_reader  # only a job that runs needs it

    return log_reader.read(outputs).lines
