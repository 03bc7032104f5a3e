"""The events that a run writes to its journal.

The journal is optional: a failed write neither stops nor delays a job (see journal/writer.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from saferun import __version__
from saferun.diagnosis.attempt_outcome import REPLACED, AttemptOutcome
from saferun.diagnosis.deciding import retry_policy
from saferun.diagnosis.evidence import NoNumber
from saferun.diagnosis.places import Place
from saferun.journal import event_types, rank_files
from saferun.journal.event_types import AttemptBegun, LossLost, SlowRank
from saferun.journal.writer import Journal
from saferun.model import Checkpoint, Identity, LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.planning.view import as_json
from saferun.supervise.attempt.attempt_values import TAIL_BYTES
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.faults import contained
from saferun.supervise.records.notifier import Notifier
from saferun.system import paths
from saferun.system.procfs import this_process
from saferun.system.redact import Masker

if TYPE_CHECKING:  # it needs statistics, which imports random and hashlib
    from saferun.diagnosis.slow_rank import Slow

VERDICT_FILE = "SAFERUN_VERDICT_FILE"  # the variable names a path of the user's


class Record:
    """The journal of a run, the data not yet written to it, and the notifier.

    Attributes:
        journal: stores events, and masks texts.
        notifier: reports events to the user's command; None if there is no command.
    """

    def __init__(self, journal: Journal, notifier: Notifier | None = None) -> None:
        self.journal, self.notifier = journal, notifier
        self._attempt = 0
        self._tails: tuple[int, AttemptEnd] | None = None  # not written yet
        self._trials = 0  # bytes of finished trials whose secrets are masked

    @property
    def path(self) -> str | None:
        """Return the run's directory; None if nothing can be written."""
        return self.journal.run_path

    def attempt(
        self, number: int, plan: LaunchPlan, history: Sequence[AttemptOutcome], torch: str | None
    ) -> None:
        """Record the start of an attempt.

        Args:
            number: the attempt's number.
            plan: the attempt's plan.
            history: the attempts before it.
            torch: torch's version; None if unknown.
        """
        self._attempt, left = number, retry_policy.left(history, plan.settings.retry)
        self.journal.plan(as_json(plan))
        gpus, price = len(plan.gpus.gpus), plan.settings.price_per_gpu_hour
        begun = AttemptBegun(number, plan.mitigations, this_process(), left, gpus, price)
        versions = (f"saferun {__version__}", *([f"torch {torch}"] if torch else []))
        names = tuple(dict.fromkeys(gpu.name for gpu in plan.gpus.gpus if gpu.name))
        checkpoint = plan.checkpoint.path if plan.checkpoint else ""
        self.journal.event(
            begun._replace(versions=versions, gpu_names=names, checkpoint=checkpoint)
        )

    def started(self, keeper: int, launcher: int) -> None:
        """Record an attempt's processes, and use the time to write the last attempt's output."""
        self.journal.event(event_types.JobStarted(keeper, launcher))
        self.keep_tails()

    def ended(self, ended: AttemptEnd, outcome: AttemptOutcome) -> None:
        """Record the end of an attempt.

        Args:
            ended: how its processes ended, with the end of its output.
            outcome: the record of the attempt.
        """
        self.journal.event(outcome)
        if self.notifier:
            self.notifier.attempt_ended(outcome)
        if outcome.way != REPLACED:  # nobody reads the output of a replaced process
            self._tails = outcome.number, ended

    def clean(self, ended: AttemptEnd) -> AttemptEnd:
        """Return how an attempt ended; secrets are removed from its output before it is cut.

        An incomplete first line is left out: half a secret cannot be recognised.
        """
        out, err = (
            self.journal.masked_data(_whole_lines(tail) if len(tail) >= TAIL_BYTES else tail)
            for tail in ended.report.tails
        )
        return ended._replace(report=ended.report._replace(tails=(out, err)))

    def hang(
        self,
        places: Sequence[Place],
        silent_s: float,
        stacks: Mapping[int, str],
        *,
        asked: bool = False,
    ) -> str | None:
        """Record where the ranks are in a silence that is too long.

        Args:
            places: where each rank is.
            silent_s: length of the silence in seconds.
            stacks: pid -> stacks, for processes that py-spy could read.
            asked: a person asked for the report; there may be no silence.

        Returns:
            The file that has the stacks; None if there is none.
        """
        text = "\n".join(stacks.values())
        file = self.journal.stacks(text) if text else None
        self.journal.event(event_types.HangSeen(silent_s, tuple(places), file))
        self.journal.sync()
        if self.notifier and not asked:
            self.notifier.hang(self._attempt, silent_s, places)
        return file and os.path.join(self.journal.path or "", file)

    def stall(self, line: str, silent_s: float = 0.0, places: Sequence[Place] = ()) -> None:
        """Record that ranks wait for another one.

        Args:
            line: who waits for whom; "" when the wait is over.
            silent_s: length of the silence in seconds.
            places: where each rank is.
        """
        self.journal.event(event_types.Stall(line, round(silent_s, 1), tuple(places)))

    def loss(self, found: NoNumber, line: str, saved: Checkpoint | None) -> None:
        """Record that the loss is not a number any more.

        Args:
            found: since when, and the last number before.
            line: the same for people.
            saved: the newest checkpoint from before that time.
        """
        path = saved.path if saved else None
        event = LossLost(line, found.value, found.step, found.good, found.good_step, path)
        self.journal.event(event)
        self.journal.sync()
        if self.notifier:
            self.notifier.loss(self._attempt, event)

    def slow(self, found: Slow, line: str, facts: Sequence[str]) -> None:
        """Record that the others wait for one rank.

        Args:
            found: the rank, and its cost.
            line: the same for people.
            facts: differences of its GPU and its CPU.
        """
        event = SlowRank(line, found.rank, found.share, found.calls, tuple(facts))
        self.journal.event(event)
        self.journal.sync()

    def keep_tails(self) -> None:
        """Write the end of the last attempt's output, while the next attempt starts."""
        if self._tails is not None:
            number, ended = self._tails
            self.journal.tails(number, *ended.report.tails)
            self.journal.sync()
            self._tails = None

    def fault(self, error: Exception, *, traceback: str = "") -> None:
        """Record a fault of saferun itself; the job continues."""
        self.journal.event(event_types.Fault(f"{type(error).__name__}: {error}", traceback))

    def mask_ranks(self, identity: Identity) -> None:
        """Remove the secrets from an attempt's rank files before anything reads them."""
        masked = self.journal.masked
        rank_files.mask(identity.receipts, identity.attempt, masked)
        self._trials = rank_files.mask_trials(identity.state, masked, self._trials)

    def harmlessly(self, work: Callable[[], object]) -> None:
        """Do work that the running job does not need; a fault there goes only to the journal."""
        contained(work, None, self.fault)

    def end(
        self, status: int | None, reason: str, advice: str = "", *, asked: bool = False
    ) -> None:
        """Record the end of the run.

        Args:
            status: exit status; None after a fault of saferun's own.
            reason: one clause.
            advice: how often the job should save; "" for nothing.
            asked: a signal from outside ended it.
        """
        self.journal.event(event_types.RunEnded(status, reason, advice, asked))
        self.keep_tails()
        if self.notifier and self.journal.is_whole:
            self.notifier.run_ended(status, reason, asked=asked)

    def close(self, wake: int = -1) -> None:
        """Close the journal, and wait for the commands that get events.

        Args:
            wake: see `Notifier.close`.
        """
        self.journal.close()
        if self.notifier:
            self.notifier.close(wake)

    def helpers(self) -> list[int]:
        """Return the pids of those commands, which are not part of an attempt."""
        return self.notifier.pids() if self.notifier else []


def _whole_lines(tail: bytes) -> bytes:
    end = re.search(rb"[\r\n]", tail) or re.search(rb"\s", tail)
    return tail[end.end() :] if end else b""


def for_run(
    journal: Journal, gathered: RunInputs, plan: LaunchPlan, say: Callable[[str], None]
) -> Record:
    """Return the record of a run, or of one worker; `notify.command` gets its events.

    Args:
        journal: the run's journal.
        gathered: the inputs of the run's plans.
        plan: the first plan.
        say: function that takes lines for people.
    """
    if not plan.settings.notify.command:
        return Record(journal)

    about = {
        "run": gathered.identity.run,
        "host": os.uname().nodename,
        "worker": gathered.identity.worker,
        "journal": journal.run_path,
    }
    return Record(journal, Notifier(plan, gathered.environ, about, journal.masked, say))


def begin(gathered: RunInputs, say: Callable[[str], None]) -> tuple[RunInputs, Journal]:
    """Make the run's directory, whose name identifies the run.

    Args:
        gathered: the inputs of the run's plans.
        say: function that takes lines for people.

    Returns:
        `gathered` with the final identity, and the journal.
    """
    request = gathered.request
    given = [f"{key}={text}" for key, text, _ in request.sets]
    if gathered.profile:  # the profile may contain secrets, too
        given += [f"{name}={setting.value}" for name, setting in gathered.profile.env.items()]
    masker = Masker(gathered.environ, (*request.line.args, *given))
    journal = Journal.begin(gathered.runs, gathered.identity.run, masker, say=say)
    if journal.path:  # the name may have been taken by another run
        identity = gathered.identity._replace(run=os.path.basename(journal.path))
        gathered = gathered._replace(identity=identity)
    return with_places(gathered, journal), journal


def with_places(gathered: RunInputs, journal: Journal) -> RunInputs:
    """Return `gathered` with the journal's directories for the job's processes."""
    receipts, settings = journal.receipts(), gathered.profile and gathered.profile.settings
    has_trials = settings is not None and settings.hooks.optuna.mode == "on"
    state = journal.state() if gathered.starts_python or has_trials else None
    watches = settings is not None and settings.watch.mode != "off"
    # The watch may ask NCCL ranks for their last collectives.
    flight = journal.flight() if watches and gathered.facts.gpu.gpus else None
    identity = gathered.identity._replace(receipts=receipts, state=state, flight=flight)
    return gathered._replace(identity=identity)


def leave_verdict(environ: Mapping[str, str], verdict: str) -> None:
    """Write a failed run's verdict to the file that `SAFERUN_VERDICT_FILE` names."""
    if path := environ.get(VERDICT_FILE):
        paths.write_private(paths.absolute(path), verdict.encode() + b"\n")
