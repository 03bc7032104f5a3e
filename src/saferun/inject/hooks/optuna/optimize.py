"""One call of `Study.optimize`, over all processes of a run or in this process alone.

`n_trials` and `timeout` are the script's values, less what earlier processes of the run have used.
The process ends by SystemExit with contract.RECYCLE_STATUS, so that the script's `finally` runs. If
the script catches that, the process still ends with this status when the script has ended.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable
from typing import Any

from ... import contract, rank
from ...context import leave
from .account import Account
from .objective import Objective

_leaving: list[str] = []  # reasons why this process ends to be replaced


class Optimization:
    """One call, from its arguments to its end.

    Args:
        trials: the account of the call's trials.
        arguments: the arguments of `optimize`, by name.
        every: number of good trials after which the process is replaced; 0 for never.
        stop: Optuna's `Study.stop`.
    """

    def __init__(
        self, trials: Account, arguments: dict[str, Any], every: int, stop: Callable[[Any], None]
    ) -> None:
        self.trials = trials
        self._arguments = arguments
        self._every = every if trials.is_kept else 0
        self._stop = stop
        self._why = ""  # reason to replace the process; "" for none
        self.is_stopped = False  # by the script or the sampler
        catch = arguments.get("catch", ())
        catch = (catch,) if isinstance(catch, type) else tuple(catch)
        self._objective = Objective(trials, arguments["func"], catch)
        trials.on_finished = self._after_trial

    def run(self, original: Callable[..., Any]) -> None:
        """Run the trials that are left.

        Args:
            original: Optuna's `Study.optimize`.
        """
        while not self._is_over():
            self._why = ""
            self.trials.run_again()
            try:
                original(**{**self._arguments, "func": self._objective, **self._limits()})
            except Exception:
                if self._why and self._objective.leaving:
                    self._leave()
                raise
            if not self._why:
                break
            if self.is_stopped or self._is_over():
                self.trials.close()
                if not self._objective.leaving:
                    return
            self._leave()
        self.trials.close()

    def _limits(self) -> dict[str, Any]:
        """Return the rest of `n_trials` and `timeout`, if the script gave them."""
        limits: dict[str, Any] = {}
        if not self.trials.is_kept:
            return limits
        if (count := self.trials.n_trials) is not None:
            limits["n_trials"] = max(0, count - self.trials.done)
        if (timeout := self._arguments.get("timeout")) is not None:
            passed = max(0.0, time.monotonic() - self.trials.began)
            limits["timeout"] = max(0.0, timeout - passed)
        return limits

    def _is_over(self) -> bool:
        return self.trials.is_closed or not all(self._limits().values())

    def _after_trial(self) -> None:
        """Stop the study if the process must be replaced; called once the trial is stored."""
        if rank.is_started_by_launcher():
            self.trials.context.guard("start", self.trials.context.list_imports)
        if self._why:
            return
        objective, good = self._objective, self.trials.good
        if objective.leaving:
            name = self.trials.study.study_name
            self._why = f"{objective.leaving} in trial {objective.leaving_for} of study {name!r}"
        elif self._every and good >= self._every:
            self._why = f"{good} good trials (hooks.optuna.recycle_every)"
        if self._why:
            self._stop(self.trials.study)

    def _leave(self) -> None:
        """End this process, so that it is replaced; return if the request cannot be written."""
        kind, context = self._objective.leaving, self.trials.context
        if context.recycle(self._why, kind=kind, progress=self.trials.done):
            _leaving.append(self._why)
            raise SystemExit(contract.RECYCLE_STATUS)
        context.say(
            f"optuna: the process cannot be replaced ({self._why}): its request cannot be written"
        )
        self._every = 0
        self._objective.leaving = ""
        if self._objective.error is not None:
            raise self._objective.error


def can_leave() -> None:
    """Keep the exit status of a process that must be replaced until the interpreter's end.

    This is registered at the import of Optuna, so it runs after the script's own exit functions.
    Code that runs later may abort after a sticky error, and the status would be lost.
    """
    atexit.register(_end)


def _end() -> None:
    if _leaving:
        logging.shutdown()
        leave(contract.RECYCLE_STATUS)
