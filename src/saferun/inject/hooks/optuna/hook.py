"""Let a study continue after CUDA errors, and replace a process that one has made unusable.

Target: `optuna.study.study`: `Study.optimize`, `ask`, `add_trial` and `stop`, `create_study`,
`delete_study` and `copy_study`; Optuna 4.5 to 5.0.
Reason: one trial's CUDA error ends a search of thousands of trials. An out-of-memory trial can be
pruned in its process; after a sticky error every later CUDA call of the process fails
(https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution).
Delete when Optuna runs each trial in a process of its own.

The next process runs the same script and finds the study again (script.py). A call of `optimize`
continues where, by the storage, the earlier process stopped (account.py), with a new seed for its
sampler (sampler.py). A rank of a distributed job accounts for its trials like a script that asks
for them itself.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ... import contract, hidden_frames, rank
from ...context import Context
from . import sampler, script, storage
from .account import Account
from .optimize import Optimization, can_leave
from .state import State

_HOOK = "optuna"
_AFTER_TRIAL = "after_trial"  # a sampler without more points stops the study in this method


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Wrap the methods and functions for the module's studies.

    Args:
        name: "optuna.study.study".
        module: that module.
        context: the process's context.
    """
    settings = context.hooks.optuna
    if settings.mode == "off":
        context.receipt(_HOOK, contract.OFF)
        return
    Hook(context, settings.recycle_every).wrap(module)
    context.receipt(_HOOK, contract.APPLIED, recycle_every=settings.recycle_every)


class Hook:
    """The state that the replaced functions of one process share.

    Args:
        context: the process's context.
        recycle_every: number of good trials after which the process is replaced; 0 for never.
    """

    def __init__(self, context: Context, recycle_every: int) -> None:
        self._context = context
        self._every = recycle_every
        self._calls: dict[str, int] = {}
        self._running: dict[int, Optimization | None] = {}  # id of the study object -> its call
        self._asking: dict[int, Account] = {}  # id of the study object -> its account
        self._samplers: list[Any] = []  # samplers with a seed of this process
        self._reported: set[str] = set()
        self._last: Optimization | None = None
        self._state = State(context.state, context) if context.state else None
        self._rank = f"rank{rank.number()}" if rank.is_rank_process() else ""

    def wrap(self, module: ModuleType) -> None:
        """Install the wrappers in optuna.study.study."""
        cls = module.Study
        self._signature = inspect.signature(cls.optimize)
        self._original_stop = cls.stop
        hidden_frames.replace(cls, "optimize", hidden_frames.hide_all)(self._optimize)
        hidden_frames.replace(cls, "ask", hidden_frames.hide_all)(self._ask)
        hidden_frames.replace(cls, "stop")(self._stop)
        storage.make_tables_once()
        if self._state is not None and (self._is_script() or self._rank):
            calls = script.Script(self._state, self._context, self._rank)
            script.wrap(module, calls, lambda one: id(one) in self._running)
            can_leave()

    def _optimize(self, original: Callable[..., Any], study: Any, *args: Any, **kwargs: Any) -> Any:
        if id(study) in self._running or rank.is_distributed():
            return original(study, *args, **kwargs)
        arguments = self._signature.bind(study, *args, **kwargs).arguments
        self._running[id(study)] = None
        try:
            call = self._context.guard(_HOOK, self._begin, study, arguments)
            if call is None:
                return original(study, *args, **kwargs)
            self._running[id(study)] = self._last = call
            before = storage.watch(study, call.trials)
            try:
                return call.run(original)
            finally:
                storage.unwatch(study, before)
        finally:
            self._running.pop(id(study), None)

    def _begin(self, study: Any, arguments: dict[str, Any]) -> Optimization:
        if self._last is not None:
            self._last.trials.close()
        number = self._calls[study.study_name] = self._calls.get(study.study_name, 0) + 1
        refusal = self._refusal(study)
        self._say_once(refusal)
        count = arguments.get("n_trials")
        trials = self._account(study, str(number), is_kept=not refusal, n_trials=count)
        return Optimization(trials, arguments, self._every, self._original_stop)

    def _account(
        self, study: Any, call: str, *, is_kept: bool, n_trials: int | None = None
    ) -> Account:
        state = self._state
        trials = Account(self._context, study, state, call, is_kept=is_kept, n_trials=n_trials)
        if is_kept and trials.begin() and not any(study.sampler is one for one in self._samplers):
            sampler.reseed(study.sampler, len(study.get_trials(deepcopy=False)))
        self._samplers.append(study.sampler)
        return trials

    def _refusal(self, study: Any) -> str:
        """Return why the process cannot be replaced in the middle of this study; "" if it can."""
        if storage.is_in_memory(study._storage):
            why = "the study is in memory and would be lost with its process"
            return f"{why}; give create_study a storage, such as sqlite:///study.db"
        if self._state is None or self._rank:
            return "the trials' state cannot be kept: no run directory, or not plain python"
        if not self._is_script():
            return "this is a process that the script started"
        return ""

    def _is_script(self) -> bool:
        return os.environ.get(contract.MAIN_MARK, "").startswith(f"{os.getpid()} ")

    def _say_once(self, refusal: str) -> None:
        if refusal and refusal not in self._reported:
            self._reported.add(refusal)
            self._context.say(
                f"optuna: the process is not replaced after CUDA errors or trials: {refusal}"
            )

    def _stop(self, original: Callable[[Any], None], study: Any) -> None:
        call = self._running.get(id(study))
        is_sampler = hidden_frames.caller().f_code.co_name == _AFTER_TRIAL
        if call is not None and is_sampler and call.trials.is_any_again():
            return  # the sampler takes a failed trial for a completed one
        original(study)
        if call is not None:
            call.is_stopped = True

    def _ask(self, original: Callable[..., Any], study: Any, *args: Any, **kwargs: Any) -> Any:
        if id(study) not in self._running:
            self._context.guard(_HOOK, self._watch_asked, study)
        return original(study, *args, **kwargs)

    def _watch_asked(self, study: Any) -> None:
        """Account for trials that a script, or a distributed rank, asks for itself."""
        if id(study) in self._asking or storage.is_in_memory(study._storage):
            return
        is_kept = self._state is not None and (self._is_script() or bool(self._rank))
        self._running[id(study)] = None
        try:
            trials = self._account(study, self._rank or "ask", is_kept=is_kept)
            trials.run_again()
            if self._rank:
                trials.failed = "exception"
            elif is_kept:
                self._say_once("the script counts its trials itself, by `ask` and `tell`")
            storage.watch(study, trials)
            self._asking[id(study)] = trials
        finally:
            self._running.pop(id(study), None)
