"""Report a study's trials to a watcher when the storage creates one or gets its result.

Target: `create_new_trial` and `set_trial_state_values` of the class of a study's storage (the
interface `optuna.storages.BaseStorage`; Optuna 4.5 to 5.0). A callback of `optimize` would read the
trial again, which costs SQLite more than a millisecond, and is not called for a trial that raises.
The methods are replaced in the class, since a pickled study includes its storage.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import optuna

from ... import hidden_frames


class Watcher(Protocol):
    """An object that is told about a study's trials; account.Account explains each call."""

    def create(self, make: Callable[[Any], int]) -> int: ...
    def taking(self, trial_id: int) -> None: ...
    def taken(self, trial_id: int) -> None: ...
    def left(self, trial_id: int) -> None: ...
    def finished(self, trial_id: int, state: Any) -> None: ...


_watchers: dict[tuple[int, int], Watcher] = {}  # by the ids of the storage object and the study
_MARK = "_saferun_watched"
# The process that creates the tables needs less than a second: one transaction on an empty
# database.
_TABLES_TRIES, _TABLES_WAIT_S = 5, 0.2
_MADE_BESIDE = ("already exists", "unique constraint", "duplicate")  # databases' messages about it


def make_tables_once() -> None:
    """Keep processes that create the same database's tables at the same time from failing.

    `RDBStorage` looks for tables and then creates the missing ones (Optuna 4.5 to 5.0). If several
    workers look at the same time, all but one would fail.
    """
    from optuna.storages import RDBStorage

    @hidden_frames.replace(RDBStorage, "__init__")
    def init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        for number in range(_TABLES_TRIES):
            try:
                original(self, *args, **kwargs)
                return
            except Exception as error:
                text = str(error).lower()
                is_beside = type(error).__module__.startswith("sqlalchemy") and any(
                    words in text for words in _MADE_BESIDE
                )
                if number == _TABLES_TRIES - 1 or not is_beside:
                    raise
            time.sleep(_TABLES_WAIT_S)


def watch(study: Any, watcher: Watcher) -> Watcher | None:
    """Register a watcher for a study's trials; return the previous one."""
    _wrap(type(study._storage))
    key = (id(study._storage), study._study_id)
    before = _watchers.get(key)
    _watchers[key] = watcher
    return before


def unwatch(study: Any, before: Watcher | None) -> None:
    """Restore the previous watcher."""
    key = (id(study._storage), study._study_id)
    if before is None:
        _watchers.pop(key, None)
    else:
        _watchers[key] = before


def place_of(storage: Any) -> list[str] | None:
    """Return the values that reopen a storage; None if unknown, or if they contain a password."""
    backend = getattr(storage, "_backend", storage)
    url = getattr(backend, "url", None)
    if isinstance(url, str):
        scheme, _, rest = url.partition("://")
        if ":" in rest.partition("@")[0] and "@" in rest:
            return None
        if scheme.startswith("sqlite") and rest.startswith("/"):
            return ["url", f"{scheme}:///{os.path.abspath(rest[1:])}"]
        return ["url", url]
    path = getattr(backend, "_file_path", None)  # from JournalFileBackend
    return ["journal", os.path.abspath(path)] if isinstance(path, str) else None


def is_in_memory(storage: Any) -> bool:
    """Return whether a storage ends with its process."""
    url = str(getattr(getattr(storage, "_backend", storage), "url", ""))
    is_sqlite = url.startswith("sqlite") and (":memory:" in url or "mode=memory" in url)
    is_unnamed = url in ("sqlite://", "sqlite:///")
    return isinstance(storage, optuna.storages.InMemoryStorage) or is_sqlite or is_unnamed


def heartbeat_callback(storage: Any) -> Callable[[Any, Any], None] | None:
    """Return the script's callback for a trial whose process is gone; None for none.

    Args:
        storage: the study's storage.
    """
    if not getattr(storage, "get_heartbeat_interval", lambda: None)():
        return None
    for name in ("get_heartbeat_stale_trial_callback", "get_failed_trial_callback"):  # 4.9; before
        if hasattr(storage, name):
            callback: Callable[[Any, Any], None] | None = getattr(storage, name)()
            return callback
    return None


def is_gone(place: list[str]) -> bool:
    """Return whether a storage's file was deleted: opening it would create an empty one.

    Args:
        place: the result of place_of.
    """
    path = place[1]
    if place[0] == "url":
        path = path.partition("sqlite:///")[2].partition("?")[0]
    return bool(path) and not os.path.exists(path)


def opened(place: list[str]) -> Any:
    """Open a storage again from the result of `place_of`."""
    if place[0] == "url":
        return place[1]
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(place[1]))


def _wrap(cls: Any) -> None:
    if getattr(cls.create_new_trial, _MARK, False):
        return

    @hidden_frames.replace(cls, "create_new_trial")
    def create_new_trial(
        original: Callable[..., int], self: Any, study_id: int, template_trial: Any = None
    ) -> int:
        watcher = _watchers.get((id(self), study_id))
        if watcher is None or template_trial is not None:
            return original(self, study_id, template_trial)
        return watcher.create(lambda template: original(self, study_id, template))

    setattr(create_new_trial, _MARK, True)

    @hidden_frames.replace(cls, "set_trial_state_values")
    def set_trial_state_values(
        original: Callable[..., bool], self: Any, trial_id: int, state: Any, values: Any = None
    ) -> bool:
        watcher = _of_trial(self, trial_id)
        if watcher is None:
            return original(self, trial_id, state, values)
        taking = state.name == "RUNNING"
        if taking:
            watcher.taking(trial_id)
            _lock_sqlite(self)
        try:
            done = original(self, trial_id, state, values)
        except Exception:
            if taking:  # for example a locked database: the trial is not ours
                watcher.left(trial_id)
            raise
        if taking:
            (watcher.taken if done else watcher.left)(trial_id)
        elif state.is_finished():
            watcher.finished(trial_id, state)
        return done


def _lock_sqlite(storage: Any) -> None:
    """Make the transaction that takes a trial out of the queue a writing one from its start.

    `RDBStorage` reads whether the trial waits, then writes that it runs, and relies on SELECT FOR
    UPDATE, which SQLite does not have (Optuna 4.5 to 5.0). So two processes could take the same
    trial, and the second one to finish it failed (UpdateFinishedTrialError).
    """
    backend = getattr(storage, "_backend", storage)
    is_sqlite = str(getattr(backend, "url", "")).startswith("sqlite")
    if not is_sqlite or not hasattr(backend, "scoped_session"):
        return
    session = backend.scoped_session()  # this thread's session, which the storage will use
    try:
        session.connection().exec_driver_sql("BEGIN IMMEDIATE")
    except Exception:
        session.close()  # locked, or a transaction of the script: continue as without us


def _of_trial(storage: Any, trial_id: int) -> Watcher | None:
    mine = {study: watcher for (of, study), watcher in _watchers.items() if of == id(storage)}
    if len(mine) < 2:
        return next(iter(mine.values()), None)
    return mine.get(storage.get_study_id_from_trial_id(trial_id))
