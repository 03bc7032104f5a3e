"""One call of `Study.optimize`: over all processes of a run, or in this process alone.

`n_trials` and `timeout` are those of the script, less what earlier processes of the run have done.
The process ends by SystemExit with contract.RECYCLE_STATUS, so that the script's `finally` runs;
where the script catches that, the process still ends with this status when the script has ended.
"""

from __future__ import annotations

import os
import sys
import time

from .. import contract
from .optuna_call import Objective, Trials
from .optuna_ledger import Ledger

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..context import Context
    from .optuna_state import State

_leaving: list[str] = []  # why this process ends to be replaced


class Optimization:
    """One call, from its arguments to its end.

    Args:
        context: the process's.
        study: the study.
        arguments: of `optimize`, by name.
        every: good trials after which the process is replaced; 0 for never.
    """

    def __init__(
        self, context: Context, study: Any, arguments: dict[str, Any], *, every: int
    ) -> None:
        self._context = context
        self.study = study
        self._arguments = arguments
        self._every = every
        self._ledger: Ledger | None = None
        self._why = ""  # it is to be replaced
        self.is_stopped = False  # by the script
        self.is_exhausted = False  # the sampler has stopped the study
        self.trials: Trials
        self._objective: Objective

    def begin(self, state: State | None, number: str, *, is_kept: bool) -> None:
        """Read where the processes before this one left the call.

        Args:
            state: the run's files; None where there are none.
            number: of the call on this study, from 1.
            is_kept: the call goes on in another process where this one ends.
        """
        self.trials = Trials(self._context, self.study, state)
        if is_kept and state is not None:
            draws = self._arguments.get("n_jobs", 1) == 1
            ledger = Ledger(state, self.study, number, draws=draws)
            if ledger.begin(self._context.say):
                self._every = 0
            else:
                self.trials.ledger = self._ledger = ledger
        catch = self._arguments.get("catch", ())
        catch = (catch,) if isinstance(catch, type) else tuple(catch)
        replaces = self._ledger is not None
        self._objective = Objective(self.trials, self._arguments["func"], catch, replaces=replaces)
        self.trials.on_finished = self._after_trial

    def close(self) -> None:
        """Note that the script goes on behind this call: no later process takes it up again."""
        if self._ledger is not None and not self._ledger.entry["closed"]:
            self._end_ledger(self._ledger)

    def run(self, original: Callable[..., Any], stop: Callable[..., Any]) -> None:
        """Run the trials that are left.

        Args:
            original: Optuna's `Study.optimize`.
            stop: Optuna's `Study.stop`.
        """
        self._stop = stop
        while not self._is_over():
            self._why, self.is_exhausted = "", False
            try:
                original(**{**self._arguments, "func": self._objective, **self._limits()})
            except BaseException as error:
                if self._why and isinstance(error, Exception) and self._objective.unusable:
                    self._leave()
                raise
            is_at_end = self.is_stopped or (self.is_exhausted and not self._is_any_queued())
            if not self._why and self.is_exhausted and not is_at_end:
                continue
            if not self._why:
                break
            if is_at_end or self._is_over():
                self.close()
                if self._objective.unusable is None:
                    return
            self._leave()
        self.close()

    def _limits(self) -> dict[str, Any]:
        """Return what is left of `n_trials` and `timeout`, where the script gave them."""
        limits: dict[str, Any] = {}
        if self._ledger is None:
            return limits
        if (count := self._arguments.get("n_trials")) is not None:
            limits["n_trials"] = max(0, count - self._ledger.entry["done"])
        if (timeout := self._arguments.get("timeout")) is not None:
            passed = max(0.0, time.monotonic() - self._ledger.entry["began"])
            limits["timeout"] = max(0.0, timeout - passed)
        return limits

    def _is_over(self) -> bool:
        ledger = self._ledger
        if ledger is None:
            return False
        if ledger.entry["closed"] or not all(self._limits().values()):
            return True
        exhausted = getattr(self.study.sampler, "is_exhausted", None)  # GridSampler
        if not ledger.entry["done"] or exhausted is None or not exhausted(self.study):
            return False
        import optuna

        waiting = (optuna.trial.TrialState.WAITING,)
        return not self.study.get_trials(deepcopy=False, states=waiting)

    def _is_any_queued(self) -> bool:
        return self._ledger is not None and self._ledger.is_any_queued()

    def _after_trial(self) -> None:
        """Stop the study where the process is to be replaced; runs once the storage has a trial."""
        if self._why:
            return
        if self._objective.unusable is not None:
            kind, number, _ = self._objective.unusable
            self._why = f"{kind} in trial {number} of study {self.study.study_name!r}"
        elif self._every and self.trials.good >= self._every:
            self._why = f"{self.trials.good} good trials (hooks.optuna.recycle_every)"
        if self._why:
            self._stop(self.study)

    def _leave(self) -> None:
        """End this process, to be replaced; return where the loop cannot know, after a line."""
        unusable = self._objective.unusable
        kind = unusable[0] if unusable else ""
        done = self._ledger.entry["done"] if self._ledger else 0
        if self._context.recycle(self._why, kind=kind, progress=done):
            _leaving.append(self._why)
            raise SystemExit(contract.RECYCLE_STATUS)
        self._context.say(
            f"optuna: the process cannot be replaced ({self._why}): its request cannot be written"
        )
        self._every = 0
        if unusable and unusable[2] is not None:
            raise unusable[2]

    def _end_ledger(self, ledger: Ledger) -> None:
        ledger.entry["closed"] = True
        try:
            ledger.save()
        except OSError as error:
            self._context.failed("optuna", error)


def can_leave() -> None:
    """Have the interpreter's end keep the status of a process that is to be replaced.

    Registered when Optuna is imported, this runs after what the script registers. What is left to
    run behind it may abort after a sticky error, and the status would be lost.
    """
    import atexit

    atexit.register(_end)


def _end() -> None:
    if not _leaving:
        return
    import logging

    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(contract.RECYCLE_STATUS)
