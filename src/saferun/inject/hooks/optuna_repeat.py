"""What a script does once must not be done again by the process that replaces it.

A script creates its study, deletes an old one before that, puts trials into the queue. The process
that replaces it runs the same lines: the study that this run has created is loaded, and what was
deleted, copied or added by the same call of an earlier process is not deleted or added again. Calls
are told apart by study and order. A study that another worker of the run has created is loaded.
"""

from __future__ import annotations

import functools

from .. import trace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    from ..context import Context
    from .optuna_state import State


# What create_study takes by position, too, before Optuna 5; the others take a study's name first.
_BY_POSITION = ("storage", "sampler", "pruner", "study_name", "direction", "load_if_exists")


class Once:
    """The calls that earlier processes of the run have made, and those of this one.

    Args:
        state: the run's files.
        context: the process's.
        rank: of a distributed job; "" for a script of its own.
    """

    def __init__(self, state: State, context: Context, rank: str = "") -> None:
        self._state = state
        self._file = f"optuna-{rank or 'script'}.json"
        self._context = context
        self._made: dict[str, int] = {}  # by this process
        entry = state.read(self._file)
        self._before: dict[str, int] = dict(entry.get("calls", {}))
        self._calls = dict(self._before)  # by all
        self._created: dict[str, list[str]] = entry.get("created", {})

    def is_repeated(self, call: str, study: str) -> bool:
        """Count a call; tell whether an earlier process has made it."""
        key = f"{call} {study}"
        self._made[key] = self._made.get(key, 0) + 1
        return self._made[key] <= self._before.get(key, 0)

    def made(self, call: str, study: str) -> None:
        """Note that a call was made."""
        key = f"{call} {study}"
        self._calls[key] = max(self._calls.get(key, 0), self._made.get(key, 0))
        self._save()

    def created_before(self, given: str) -> str | None:
        """Return the name of the study that an earlier process created by this call.

        Args:
            given: the name that the script gives; "" where it gives none.
        """
        number = self._made.get("create " + given, 0)
        self._made["create " + given] = number + 1
        names = self._created.get(given, [])
        return names[number] if number < len(names) else None

    def created_beside(self, name: str) -> bool:
        """Tell whether another worker of this run has created a study; it notes that afterwards."""
        return self._state.wait_beside(
            self._file, lambda entry: name in entry.get("created", {}).get(name, [])
        )

    def created(self, given: str, name: str) -> None:
        """Note the study that a call has created."""
        self._created.setdefault(given, []).append(name)
        self._save()

    def _save(self) -> None:
        try:
            self._state.write(self._file, {"calls": self._calls, "created": self._created})
        except Exception as error:
            self._context.failed("optuna", error)


def wrap(module: ModuleType, once: Once, is_running: Callable[[Any], bool]) -> None:
    """Wrap what makes, deletes and fills studies.

    Args:
        module: optuna.study.study.
        once: the calls so far.
        is_running: tells whether a study is being optimized; what callbacks add is no line of the
            script's that is run again.
    """
    studies: Any = module
    studies.create_study = _create(studies.create_study, once)
    studies.delete_study = _named(studies.delete_study, once, "delete", "study_name")
    studies.copy_study = _named(studies.copy_study, once, "copy", "from_study_name")
    original = studies.Study.add_trial

    @functools.wraps(original)
    def add_trial(self: Any, trial: Any) -> None:
        if is_running(self) or is_in_memory(self._storage):
            original(self, trial)
        elif not once.is_repeated("add", self.study_name):
            original(self, trial)
            once.made("add", self.study_name)

    studies.Study.add_trial = trace.hidden(add_trial)


def is_in_memory(storage: Any) -> bool:
    """Tell whether a storage ends with its process."""
    import optuna

    url = str(getattr(getattr(storage, "_backend", storage), "url", ""))
    is_sqlite = url.startswith("sqlite") and (":memory:" in url or "mode=memory" in url)
    is_unnamed = url in ("sqlite://", "sqlite:///")
    return isinstance(storage, optuna.storages.InMemoryStorage) or is_sqlite or is_unnamed


def _create(original: Callable[..., Any], once: Once) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_study(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(_BY_POSITION, args)), **kwargs}
        if arguments.get("storage") is None:
            return original(*args, **kwargs)
        given = arguments.get("study_name") or ""
        name = once.created_before(given)
        if name is not None:
            return original(**{**arguments, "study_name": name, "load_if_exists": True})
        try:
            study = original(*args, **kwargs)
        except Exception as error:
            is_there = type(error).__name__ == "DuplicatedStudyError"
            if not (is_there and given and once.created_beside(given)):
                raise
            study = original(**{**arguments, "load_if_exists": True})
        if not is_in_memory(study._storage):
            once.created(given, study.study_name)
        return study

    return trace.hidden(create_study)


def _named(
    original: Callable[..., Any], once: Once, call: str, argument: str
) -> Callable[..., Any]:
    @functools.wraps(original)
    def once_only(*args: Any, **kwargs: Any) -> Any:
        study = str(args[0] if args else kwargs.get(argument, ""))
        if once.is_repeated(call, study):
            return None
        try:
            return original(*args, **kwargs)
        finally:
            once.made(call, study)

    return trace.hidden(once_only)
