"""Let a process that replaces another one find the studies of this run again.

The next process runs the script's lines again. `create_study` then loads the study that the same
call created before (or that another worker of the run created). `delete_study`, `copy_study` and
`add_trial` (which `enqueue_trial` uses) do nothing if an earlier process has made the same call.
Calls are identified by study and order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ... import hidden_frames
from ...context import Context
from .state import State
from .storage import is_in_memory

# Before Optuna 5, create_study also takes these by position; the other functions take a study's
# name first.
_BY_POSITION = ("storage", "sampler", "pruner", "study_name", "direction", "load_if_exists")


class Script:
    """The calls that earlier processes of the run have made, and those of this one.

    Args:
        state: the run's files.
        context: the process's context.
        rank: the rank in a distributed job; "" otherwise.
    """

    def __init__(self, state: State, context: Context, rank: str = "") -> None:
        self._state = state
        self._context = context
        self._file = f"optuna-{rank or 'script'}.json"
        kept = state.read(self._file)
        self._before: dict[str, int] = kept.get("calls", {})
        self._made: dict[str, int] = {}  # calls made by this process
        self._created: dict[str, list[str]] = kept.get("created", {})

    def once(self, call: str, study: str, action: Callable[[], Any]) -> Any:
        """Do an action unless an earlier process has done it.

        Args:
            call: the name of Optuna's function.
            study: the name of the study that it concerns.
            action: function that does it.
        """
        key = f"{call} {study}"
        self._made[key] = self._made.get(key, 0) + 1
        if self._made[key] <= self._before.get(key, 0):
            return None
        try:
            return action()
        finally:
            self._save()

    def create(self, original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Create a study, or load the one that this call or another worker has created.

        Args:
            original: Optuna's `create_study`.
            arguments: its arguments, by name.
        """
        given = arguments.get("study_name") or ""
        number = self._made["create " + given] = self._made.get("create " + given, 0) + 1
        names = self._created.setdefault(given, [])
        if number <= len(names):
            arguments = {**arguments, "study_name": names[number - 1], "load_if_exists": True}
            return original(**arguments)
        try:
            study = original(**arguments)
        except Exception as error:
            is_there = type(error).__name__ == "DuplicatedStudyError"
            if not (is_there and given and self._is_created_beside(given)):
                raise
            study = original(**{**arguments, "load_if_exists": True})
        if not is_in_memory(study._storage):
            names.append(study.study_name)
            self._save()
        return study

    def _is_created_beside(self, name: str) -> bool:
        """Return whether another worker of this run has created a study, as it notes afterwards."""
        return self._state.wait_beside(
            self._file, lambda kept: name in kept.get("created", {}).get(name, [])
        )

    def _save(self) -> None:
        calls = {key: max(n, self._made.get(key, 0)) for key, n in self._before.items()}
        kept = {"calls": {**self._made, **calls}, "created": self._created}
        self._context.guard("optuna", self._state.write, self._file, kept)


def wrap(module: ModuleType, script: Script, is_running: Callable[[Any], bool]) -> None:
    """Wrap the functions that create, delete and fill studies.

    Args:
        module: optuna.study.study.
        script: the calls so far.
        is_running: tells whether a study is being optimized; trials that callbacks add do not come
            from a repeated line of the script.
    """
    studies: Any = module

    @hidden_frames.replace(studies.Study, "add_trial")
    def add_trial(original: Callable[..., None], self: Any, trial: Any) -> None:
        if is_running(self) or is_in_memory(self._storage):
            original(self, trial)
        else:
            script.once("add", self.study_name, lambda: original(self, trial))

    @hidden_frames.replace(studies, "create_study")
    def create_study(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(_BY_POSITION, args)), **kwargs}
        if arguments.get("storage") is None:
            return original(*args, **kwargs)
        return script.create(original, arguments)

    @hidden_frames.replace(studies, "delete_study")
    def delete_study(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        study = str(args[0] if args else kwargs.get("study_name", ""))
        return script.once("delete", study, lambda: original(*args, **kwargs))

    @hidden_frames.replace(studies, "copy_study")
    def copy_study(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        study = str(args[0] if args else kwargs.get("from_study_name", ""))
        return script.once("copy", study, lambda: original(*args, **kwargs))
