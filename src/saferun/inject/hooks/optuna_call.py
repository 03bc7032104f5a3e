"""One call of `Study.optimize` or a loop of `ask` and `tell`: its trials, and when they end.

A trial that is out of GPU memory is pruned and the process goes on. After a sticky CUDA error the
trial is pruned too, as in the incident that this is for: from a pruned trial a sampler learns that
its parameters are bad, and from a failed one nothing. Then the study is stopped, and the process
ends, to be replaced, once the storage has the trial.
"""

from __future__ import annotations

import signal

from .. import cut, trace
from . import cuda_failures, memory, optuna_ledger, optuna_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..context import Context
    from .optuna_ledger import Ledger
    from .optuna_state import State

_MESSAGE_CHARS = 500  # of an error's text, as in the incident
_PRUNED_CHARS = 200


class Running:
    """A trial that runs in this process."""

    def __init__(self, trial: Any) -> None:
        self.trial = trial
        self.cause = ""  # why it is pruned or failed
        self.counts = True  # as one of n_trials
        self.began_s = _now()


class Trials:
    """The trials of one call, as the storage is told about them: a `Watcher`.

    Args:
        context: the process's.
        study: the study.
        state: the run's files; None where there are none.
    """

    def __init__(self, context: Context, study: Any, state: State | None) -> None:
        self.context = context
        self.study = study
        self._state = state
        self.ledger: Ledger | None = None
        self.running: dict[int, Running] = {}
        self.good = 0  # of this process
        self.failed = "no valid value"  # the cause of a failed trial that has no other
        self.on_finished: Callable[[], None] = lambda: None

    def creating(self) -> Any:
        return self._kept(lambda ledger: ledger.creating())

    def created(self, template: Any, trial_id: int) -> None:
        self._kept(lambda ledger: ledger.created(template, trial_id))

    def taking(self, trial_id: int) -> None:
        self._kept(lambda ledger: ledger.taking(trial_id))

    def left(self, trial_id: int) -> None:
        self._kept(lambda ledger: ledger.left(trial_id))

    def begun(self, trial: Any) -> Running:
        """Note a trial that the script has."""
        running = self.running[trial._trial_id] = Running(trial)
        return running

    def finished(self, trial_id: int, state: Any, values: Any) -> None:
        running = self.running.pop(trial_id, None)
        if running is None:  # not one that the script's objective has
            self.left(trial_id)
            return
        cuda = running.cause in (cuda_failures.OUT_OF_MEMORY, *cuda_failures.STICKY.values())
        is_good = state.name in ("COMPLETE", "PRUNED") and not cuda
        self.good += is_good
        record = {
            "study": self.study.study_name,
            "number": running.trial.number,
            "state": state.name,
            "cause": running.cause or {"FAIL": self.failed, "PRUNED": "pruner"}.get(state.name, ""),
            "params": optuna_state.shown(running.trial.params),
            "values": list(values) if values is not None else None,
            "seconds": round(_now() - running.began_s, 6),
        }
        ledger, files = self.ledger, self._state
        if ledger is not None:
            row = 0 if is_good else ledger.entry["row"] + cuda
            ledger.entry["row"] = row
            self._kept(lambda own: own.finished(trial_id, record, counts=running.counts))
        elif files is not None:
            self._harmlessly(lambda: files.record(record))
        self.on_finished()

    def _kept(self, action: Callable[[Ledger], Any]) -> Any:
        ledger = self.ledger
        return None if ledger is None else self._harmlessly(lambda: action(ledger))

    def _harmlessly(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self.context.failed("optuna", error)
        return None


class Objective:
    """The objective of one call, as Optuna calls it.

    Args:
        trials: of the call.
        function: the script's.
        catch: exceptions after which the study goes on.
        replaces: the process can be replaced.
    """

    def __init__(
        self, trials: Trials, function: Any, catch: tuple[type, ...], *, replaces: bool
    ) -> None:
        self._trials = trials
        self._function = function
        self._catch = catch
        self._replaces = replaces
        self.unusable: tuple[str, int, BaseException | None] | None = None  # kind, trial, error

    def __call__(self, trial: Any) -> Any:
        """Run a trial; prune it where the GPU's memory or a sticky error ended it."""
        running = self._trials.begun(trial)
        try:
            value = self._function(trial)
        except BaseException as error:
            pruned = self._judged(running, error)
            if not pruned:
                trace.hide(error)
                raise
        else:
            self._look(trial.number)
            return value
        # Out of the `except`: nothing holds the frames of the objective, and so its tensors.
        memory.clear_cache()
        import optuna

        raise optuna.TrialPruned(pruned)

    def _judged(self, running: Running, error: BaseException) -> str:
        """Note why a trial ends; return the text with which it is pruned, "" to let it pass."""
        import optuna

        is_pruned = isinstance(error, optuna.TrialPruned)
        if kind := cuda_failures.sticky_kind(error):
            return self._sticky(running, error, kind)
        if cuda_failures.is_out_of_memory(error) and not is_pruned:
            running.cause = cuda_failures.OUT_OF_MEMORY
            return self._described(running.trial, error)
        if not is_pruned:
            running.cause = type(error).__name__
            running.counts = isinstance(error, self._catch)
        if isinstance(error, SystemExit) and not error.code:
            self._ended(running, error)
        return ""

    def _ended(self, running: Running, error: SystemExit) -> None:
        """Leave no trial running in which its process ends with status 0; Optuna would.

        Lightning (2.0 to 2.6) does that on SIGTERM. With the signal's status the trial is one that
        was killed, and the search goes on unless it was saferun that got the signal.
        """
        if self._replaces and type(error).__name__ == "SIGTERMException":
            error.code = 128 + signal.SIGTERM
            return
        trials, own = self._trials, running.trial._trial_id
        try:
            optuna_ledger.fail(trials.study, own, "its process ended (status 0)")
        except Exception as failure:
            trials.context.failed("optuna", failure)

    def _sticky(self, running: Running, error: BaseException, kind: str) -> str:
        import optuna

        is_pruned = isinstance(error, optuna.TrialPruned)
        text = "" if is_pruned else self._described(running.trial, error)
        if self.unusable is not None:  # another thread's trial; these parameters are not the cause
            running.cause = f"GPU unusable since trial {self.unusable[1]}"
            running.counts = is_pruned
            return ""
        running.cause = kind
        row = self._trials.ledger.entry["row"] if self._trials.ledger else 0
        if not self._replaces or row + 1 >= optuna_ledger.ROW:
            running.counts = is_pruned or isinstance(error, self._catch)
            return ""
        self.unusable = (kind, running.trial.number, error.with_traceback(None))
        return text

    def _look(self, number: int) -> None:
        """Notice a sticky error that no call of the objective's has met yet."""
        import sys

        torch = sys.modules.get("torch")
        try:
            if torch is not None and torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:
            kind = cuda_failures.sticky_kind(error)
            if kind and self._replaces and self.unusable is None:
                self.unusable = (kind, number, error.with_traceback(None))

    def _described(self, trial: Any, error: BaseException) -> str:
        """Set the attributes of a CUDA error; return the text with which the trial is pruned."""
        name, text = type(error).__name__, str(error)
        attributes = {
            "cuda_error": True,
            "cuda_error_type": name,
            "cuda_error_msg": cut.beginning(text, _MESSAGE_CHARS),
        }
        try:
            for key, value in attributes.items():
                optuna_ledger.patiently(lambda k=key, v=value: trial.set_user_attr(k, v))  # type: ignore[misc]  # bound at once
        except Exception as failure:
            self._trials.context.failed("optuna", failure)
        first = cut.beginning(text.partition("\n")[0], _PRUNED_CHARS)
        return f"CUDA error ({name}): {first}"


def _now() -> float:
    import time

    return time.monotonic()
