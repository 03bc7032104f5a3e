"""Keep a study going through CUDA errors, and replace the process that one has made unusable.

Target: `optuna.study.study`: `Study.optimize`, `ask`, `add_trial` and `stop`, `create_study`,
`delete_study` and `copy_study`; Optuna 4.5 to 5.0.
Reason: a search of thousands of trials that dies of one trial's CUDA error. An out-of-memory trial
can be pruned in its process; after a sticky error every later CUDA call of the process fails
(https://docs.pytorch.org/docs/stable/notes/cuda.html#asynchronous-execution).
Delete when Optuna runs each trial in a process of its own.

The process that comes next runs the same script. What the run has done already it does not do again
(optuna_repeat.py), and a call of `optimize` goes on where the earlier process left it
(optuna_ledger.py), with the same sequence of a seeded sampler (optuna_sampler.py). A rank of a
distributed job keeps its trials as a script that asks for them itself does.
"""

from __future__ import annotations

import functools
import os
import sys

from .. import contract, rank, trace
from . import optuna_repeat, optuna_storage
from .optuna_call import Trials
from .optuna_ledger import Ledger
from .optuna_optimize import Optimization, can_leave
from .optuna_state import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from ..context import Context

_HOOK = "optuna"
_AFTER_TRIAL = "after_trial"  # of a sampler that has no more points: it stops the study


def apply(name: str, module: ModuleType, context: Context) -> None:
    """Wrap the module's studies.

    Args:
        name: "optuna.study.study".
        module: that module.
        context: the process's.
    """
    settings = context.hooks["optuna"]
    if settings["mode"] == "off":
        context.receipt(_HOOK, contract.OFF)
        return
    Hook(context, settings["recycle_every"]).wrap(module)
    context.receipt(_HOOK, contract.APPLIED, recycle_every=settings["recycle_every"])


class Hook:
    """What the wrapped functions of one process share.

    Args:
        context: the process's.
        recycle_every: good trials after which the process is replaced; 0 for never.
    """

    def __init__(self, context: Context, recycle_every: int) -> None:
        self._context = context
        self._every = recycle_every
        self._pid = os.getpid()
        self._calls: dict[str, int] = {}
        self._running: dict[int, Optimization | None] = {}  # by the id of the study object
        self._asking: dict[int, Trials] = {}  # by the id of the study object
        self._reported: set[str] = set()
        self._last: Optimization | None = None
        self._state = State(context.state, context) if context.state else None
        self._rank = f"rank{rank.number()}" if rank.is_rank_process() else ""

    def wrap(self, module: ModuleType) -> None:
        """Put the wrappers into optuna.study.study."""
        study: Any = module.Study
        study.optimize = self._optimize(study.optimize)
        study.ask = self._ask(study.ask)
        study.stop = self._stop(study.stop)
        optuna_storage.make_tables_once()
        if self._state is not None and (self._is_script() or self._rank):
            once = optuna_repeat.Once(self._state, self._context, self._rank)
            optuna_repeat.wrap(module, once, lambda one: id(one) in self._running)
            can_leave()

    def _optimize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import inspect

        signature = inspect.signature(original)

        @functools.wraps(original)
        def optimize(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self_) in self._running or rank.is_distributed():
                return original(self_, *args, **kwargs)
            arguments = signature.bind(self_, *args, **kwargs).arguments
            self._running[id(self_)] = None
            try:
                call = self._running[id(self_)] = self._begin(self_, arguments)
                if call is None:
                    return original(self_, *args, **kwargs)
                return self._run(call, original)
            finally:
                self._running.pop(id(self_), None)

        return trace.hidden(optimize, trace.hide_all)

    def _begin(self, study: Any, arguments: dict[str, Any]) -> Optimization | None:
        try:
            return self._begun(study, arguments)
        except Exception as error:
            self._context.failed(_HOOK, error)
        return None

    def _begun(self, study: Any, arguments: dict[str, Any]) -> Optimization:
        if self._last is not None:
            self._last.close()
        number = self._calls[study.study_name] = self._calls.get(study.study_name, 0) + 1
        refusal = self._refusal(study)
        call = Optimization(self._context, study, arguments, every=0 if refusal else self._every)
        self._say_once(refusal)
        call.begin(self._state, str(number), is_kept=not refusal)
        return call

    def _run(self, call: Optimization, original: Callable[..., Any]) -> None:
        study, self._last = call.study, call
        before = optuna_storage.watch(study, call.trials)
        try:
            call.run(original, self._original_stop)
        finally:
            optuna_storage.unwatch(study, before)

    def _refusal(self, study: Any) -> str:
        """Return why the process cannot be replaced in the middle of this study; "" if it can."""
        if optuna_repeat.is_in_memory(study._storage):
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

    def _stop(self, original: Callable[..., Any]) -> Callable[..., Any]:
        self._original_stop = original

        @functools.wraps(original)
        def stop(self_: Any) -> None:
            original(self_)
            call = self._running.get(id(self_))
            # Frame 1 is the wrapper of trace.hidden, frame 2 the caller.
            if call is not None and sys._getframe(2).f_code.co_name == _AFTER_TRIAL:
                call.is_exhausted = True
            elif call is not None:
                call.is_stopped = True

        return trace.hidden(stop)

    def _ask(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def ask(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if id(self_) in self._running:
                return original(self_, *args, **kwargs)
            trials = self._asked(self_)
            trial = original(self_, *args, **kwargs)
            if trials is not None:
                trials.begun(trial)
            return trial

        return trace.hidden(ask, trace.hide_all)

    def _asked(self, study: Any) -> Trials | None:
        """Return who is told about trials that a script asks for itself, or a distributed rank."""
        known = self._asking.get(id(study))
        if known is not None or optuna_repeat.is_in_memory(study._storage):
            return known
        self._running[id(study)] = None
        try:
            trials = Trials(self._context, study, self._state)
            if self._state is not None and (self._is_script() or self._rank):
                if self._rank:
                    trials.failed = "exception"
                else:
                    self._say_once("the script counts its trials itself, by `ask` and `tell`")
                ledger = Ledger(self._state, study, self._rank or "ask", draws=True)
                if not ledger.begin(self._context.say):
                    trials.ledger = ledger
            optuna_storage.watch(study, trials)
            self._asking[id(study)] = trials
        except Exception as error:
            self._context.failed(_HOOK, error)
            return None
        finally:
            self._running.pop(id(study), None)
        return trials
