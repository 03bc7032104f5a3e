"""Pure: the evidence that decided a diagnosis, as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from saferun.base.durations import seconds
from saferun.diagnosis.evidence import Evidence

if TYPE_CHECKING:  # a launch loads this file, and does without dataclasses
    from saferun.diagnosis.deciding.candidate import Candidate

_NO_KILL = "kernel: no process was killed for lack of memory"
# The facts that turn the usual kind of a signal or message into these kinds (refinements.py).
_FACTS = {
    "crash-after-the-end": "receipts: the scripts of all ranks had reached their end",
    "killed-from-outside": _NO_KILL,
    "ended-by-signal": _NO_KILL,
    "segfault-environment": "stack: Python was loading a module of compiled code",
    "bus-error": "shared memory: large and mostly free",
    "output-reader-gone": "the output's reader: gone",
    "permission-denied": "disk: there is room where the file could not be opened",
}
_BY_PROGRESS = (
    *("cuda-illegal-access", "cuda-illegal-access-sporadic", "cuda-launch-failure"),
    *("cublas-cudnn-failed", "hub-unavailable"),
)


def named(best: Candidate, evidence: Evidence) -> tuple[str, ...]:
    """Return the evidence for the root cause: its source, then what else decided the kind."""
    return (best.source.name, *_facts(best, evidence))


def _facts(best: Candidate, evidence: Evidence) -> Iterator[str]:
    if best.kind == "host-oom-killed" and evidence.oom_kills:
        yield kills(evidence.oom_kills)
    if not best.usual:
        return
    if best.kind in _FACTS and (evidence.finished or best.kind != "crash-after-the-end"):
        yield _FACTS[best.kind]
    elif best.kind in _BY_PROGRESS:
        ran = f" in {seconds(evidence.age_s)}" if evidence.age_s is not None else ""
        at = f" up to step {evidence.step}" if evidence.step is not None else ""
        yield f"progress{at}{ran}" if at or ran else "progress, as the log shows it"
    else:
        yield f"numbers and lines beside the message, which is that of {best.usual}"


def known_from(decided_by: Sequence[str]) -> list[str]:
    """Return the line about the deciding evidence; [] if the job's own words decided."""
    if all(one.startswith(("log", "error file")) for one in decided_by):
        return []
    return [f"known from: {'; '.join(decided_by)}"]


def kills(count: int) -> str:
    """Return the value of the kernel's counter of kills, in words."""
    return f"kernel: {count} killed for lack of memory while it ran"
