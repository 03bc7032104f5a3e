"""The objective of one call: a trial is pruned if the GPU failed in it.

A trial that runs out of GPU memory is pruned, and the process continues. A trial whose error made
the process's CUDA context unusable is pruned, too: from a pruned trial a sampler learns that its
parameters are bad, and from a failed one nothing. Then the study is stopped, and the process ends,
to be replaced, once the trial is in the storage. If a CUDA library fails although the context
works, the trial is run again in one new process; after a second failure it is pruned.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import optuna

from ... import cut, hidden_frames
from .. import cuda_failures, memory
from . import account
from .account import Account

_MESSAGE_CHARS = 500  # most characters of an error's text in the attribute
_PRUNED_CHARS = 200


class Objective:
    """A script's objective, wrapped.

    Args:
        trials: the account of the call's trials.
        function: the script's objective.
        catch: exceptions after which the study continues.
    """

    def __init__(self, trials: Account, function: Any, catch: tuple[type, ...]) -> None:
        self._trials = trials
        self._function = function
        self._catch = catch
        self.leaving = ""  # kind of the failure for which this process is replaced
        self.leaving_for = 0  # number of the trial with that failure
        self.error: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, trial: Any) -> Any:
        """Run a trial; prune it if the GPU ended it."""
        try:
            value = self._function(trial)
        except BaseException as error:
            pruned = self._judge(trial, error)
            if not pruned:
                hidden_frames.hide(error)
                raise
        else:
            if kind := cuda_failures.unusable_kind():  # no call of the objective has met it so far
                self._leave(kind, trial, None)
            return value
        # After the `except`, nothing holds the objective's frames, and so its tensors, any more.
        memory.clear_cache()
        raise optuna.TrialPruned(pruned)

    def _judge(self, trial: Any, error: BaseException) -> str:
        """Note why a trial ends; return the text with which it is pruned, "" to raise the error."""
        if not isinstance(error, Exception):
            self._note(trial, type(error).__name__, error)
            if isinstance(error, SystemExit) and not error.code:
                self._ended(trial, error)
            return ""
        is_pruned = isinstance(error, optuna.TrialPruned)
        what, kind = cuda_failures.judged(error)
        if not what or (is_pruned and what != cuda_failures.UNUSABLE):
            if not is_pruned:
                self._note(trial, type(error).__name__, error)
            return ""
        if what == cuda_failures.UNUSABLE:
            return self._unusable(trial, error, kind)
        if what == cuda_failures.UNCLEAR:
            if self._trials.is_last_in_row:
                self._note(trial, kind, error)
                return ""
            if self._is_first(trial):
                self._leave(kind, trial, error)
                self._run_again(trial, f"{kind}: run again in a new process")
                return ""
        self._trials.causes[trial._trial_id] = kind
        return self._described(trial, error)

    def _unusable(self, trial: Any, error: Exception, kind: str) -> str:
        """Request a new process; only the first trial that met the error is the cause."""
        is_pruned = isinstance(error, optuna.TrialPruned)
        replaces = self._trials.is_kept and not self._trials.is_last_in_row
        if replaces and not self._leave(kind, trial, error) and not is_pruned:
            self._run_again(trial, f"GPU unusable since trial {self.leaving_for}")
            return ""
        if replaces:
            self._trials.causes[trial._trial_id] = kind
        else:
            self._note(trial, kind, error)
        text = "" if is_pruned else self._described(trial, error)
        return text if replaces else ""

    def _note(self, trial: Any, cause: str, error: BaseException) -> None:
        self._trials.causes[trial._trial_id] = cause
        if not isinstance(error, (optuna.TrialPruned, *self._catch)):
            self._trials.again.add(trial._trial_id)

    def _is_first(self, trial: Any) -> bool:
        stored = self._trials.study._storage.get_trial(trial._trial_id)
        return self._trials.is_kept and account.RETRY not in stored.system_attrs

    def _run_again(self, trial: Any, cause: str) -> None:
        """Let the next process run a trial again that fails for no reason of its own."""
        self._trials.causes[trial._trial_id] = cause.partition(":")[0]
        self._trials.again.add(trial._trial_id)
        self._set(trial, {account.CAUSE: cause})

    def _leave(self, kind: str, trial: Any, error: BaseException | None) -> bool:
        """Request a new process; return whether this trial is the first one to request it."""
        with self._lock:
            if self.leaving or not self._trials.is_kept:
                return False
            self.leaving, self.leaving_for = kind, trial.number
            self.error = error.with_traceback(None) if error else None
            return True

    def _ended(self, trial: Any, error: SystemExit) -> None:
        """Mark a trial as failed if its process exits with 0; Optuna would leave it running.

        Lightning (2.0 to 2.6) ends so on SIGTERM. With the signal's status the trial counts as
        killed, and the search continues unless saferun itself got the signal.
        """
        if self._trials.is_kept and type(error).__name__ == "SIGTERMException":
            error.code = 128 + signal.SIGTERM
            return
        self._trials.again.discard(trial._trial_id)
        own = self._trials
        cause = "its process ended (status 0)"
        own.context.guard("optuna", account.fail, own.study, trial._trial_id, cause)

    def _described(self, trial: Any, error: BaseException) -> str:
        """Set the attributes of a CUDA error; return the text with which the trial is pruned."""
        name, text = type(error).__name__, cuda_failures.text_of(error)
        if cuda_failures.unusable and cuda_failures.unusable != f"{name}: {text}":
            text = f"{text}\n{cuda_failures.unusable}"
        attributes = {
            "cuda_error": True,
            "cuda_error_type": name,
            "cuda_error_msg": cut.beginning(text, _MESSAGE_CHARS),
        }
        self._set(trial, attributes)
        return f"CUDA error ({name}): {cut.beginning(text.partition(chr(10))[0], _PRUNED_CHARS)}"

    def _set(self, trial: Any, attributes: dict[str, Any]) -> None:
        for key, value in attributes.items():
            self._trials.context.guard(
                "optuna", account.patiently, lambda k=key, v=value: trial.set_user_attr(k, v)
            )
