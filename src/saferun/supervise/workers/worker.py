"""The supervisor of one of several workers: the loop of a run in its own process.

It is forked from saferun before saferun has a second thread. The kernel ends it when saferun ends;
then its keeper ends the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from saferun.base import prctl
from saferun.errors import EXIT_SOFTWARE, SaferunError
from saferun.gpu.lock.slots import Slot
from saferun.journal.writer import Journal
from saferun.planning.inputs import RunInputs
from saferun.supervise.loop import RunEnd, Say, run
from saferun.supervise.records import record

_REPORT_BYTES = 4096  # PIPE_BUF: written in one piece


@dataclass(frozen=True, slots=True)
class Part:
    """The differences of a worker from the others."""

    number: int
    slot: Slot
    visible: str | None  # its CUDA_VISIBLE_DEVICES; None: the run's
    report: int  # descriptor of a pipe to saferun, for the final report
    saferun: int  # pid


def be_supervisor(
    part: Part, gathered: RunInputs, journal: Journal, say: Say, leave: Callable[[], None]
) -> NoReturn:
    """Run the attempts of a worker and end this process, which was just forked.

    Args:
        part: the worker.
        gathered: the inputs of the run's plans.
        journal: the run's journal.
        say: function that takes lines for people.
        leave: function that releases what belongs only to saferun.
    """
    status = EXIT_SOFTWARE
    say = prefixed(say, part.number)
    try:
        prctl.die_with_parent()
        if os.getppid() == part.saferun:
            leave()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            status = _attempts(part, gathered, journal.for_worker(part.number, say), say)
    except KeyboardInterrupt:  # before the signals are blocked
        status = 130
    except SaferunError as error:
        say(str(error))
        status = error.code
    except BaseException as error:
        import traceback  # only our own fault needs it

        traceback.print_exception(error)
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(status)


def _attempts(part: Part, gathered: RunInputs, journal: Journal, say: Say) -> int:
    """Run the attempts of a worker; return its exit status."""
    identity = gathered.identity._replace(worker=part.number, visible=part.visible)
    gathered = gathered._replace(identity=identity)
    if part.visible is not None and part.slot.gpu is not None:
        gpu = gathered.facts.gpu._replace(gpus=(part.slot.gpu,))
        gathered = gathered._replace(facts=gathered.facts._replace(gpu=gpu))

    with part.slot.held as held:
        end = run(record.with_places(gathered, journal), held, journal, say, worker=True)
    words = json.dumps(end._replace(reason=end.reason[:500]))
    with contextlib.suppress(OSError):  # its reader is gone
        os.write(part.report, words.encode()[:_REPORT_BYTES])
    return end.status


def last_words(report: int) -> RunEnd:
    """Return what a supervisor left on the end of its worker; closes the pipe.

    Args:
        report: the pipe's reading end.
    """
    with open(report, "rb") as pipe:
        os.set_blocking(report, False)
        content = pipe.read() or b""
    try:
        return RunEnd(*json.loads(content))
    except ValueError:  # it was killed
        return RunEnd(1, at_s=time.monotonic())


def prefixed(say: Say, number: int) -> Say:
    """Return a `say` that puts the worker's number before each line."""

    def say_it(text: str) -> None:
        lines = text.splitlines()
        say("\n".join(f"worker {number}: {line}" if line else "" for line in lines))

    return say_it
