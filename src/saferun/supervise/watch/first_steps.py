"""Watch the first steps that the ranks of an attempt print: all have to begin at the same one.

If one rank does not find the others' checkpoint, it begins at step 0, and the run succeeds with
wrong weights. The hook `init` compares the optimizers' step counts, but many optimizers have none,
and a job may run without hooks. The ranks' output is in the keeper's memory, or in the files that
the job writes to, including torchrun's file for each rank (`--redirects`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.reading import log_reader, progress
from saferun.diagnosis.reading.log_lines import Line
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.beside import NEVER_S, Beside
from saferun.supervise.watch.running_job import RunningJob

_EVERY_S = 3.0
_LOOKS = 40  # after so many, the kept output has no first steps any more
_KIND = "ranks-differ"


class FirstSteps(Beside):
    """Watch the first steps of one attempt.

    Args:
        job: the attempt. If it resumes from another one and its ranks differ, it is ended; in a
            first attempt each rank may have a different part of the work.
    """

    def __init__(self, job: RunningJob) -> None:
        plan, agree = job.plan, job.plan.settings.hooks.init.agree
        self._job = job
        self._ends = agree == "error" and (job.number > 1 or plan.checkpoint is not None)
        self._left = 0 if agree == "off" or plan.launcher != "torchrun" else _LOOKS
        self._sizes = job.sizes()  # sizes of its files before the attempt

    def look(self) -> float:
        """Look at the job; return the seconds until the next look."""
        if not self._left:
            return NEVER_S
        self._left -= 1
        self._compare(self._lines())
        return _EVERY_S

    def ended(self, ended: AttemptEnd) -> None:
        """Examine the beginning of an ended attempt's output."""
        if self._left and ended.ended_by == "job":
            self._ends = False
            self._compare(_lines_of(ended.report.heads))

    def _lines(self) -> list[Line]:
        lines = [*_lines_of(self._job.beginnings(self._sizes))]
        for rank, files in self._job.beginnings_of_ranks().items():
            lines += [line._replace(rank=rank) for line in _lines_of(files)]
        return lines

    def _compare(self, lines: Sequence[Line]) -> None:
        found = progress.apart(lines)
        if found is None:
            return
        self._left = 0
        line = f"ranks begin at different steps: {found.difference}"
        if found.is_far and self._ends:
            self.cause = Hang(_KIND, None, line, "the steps that the ranks print")
        elif found.difference:
            self._job.say(
                f"{line}. If they train one model, its weights become wrong: have all ranks load "
                "the same checkpoint"
            )


def _lines_of(outputs: Iterable[bytes]) -> tuple[Line, ...]:
    return log_reader.read(outputs).lines
