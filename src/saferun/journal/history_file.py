"""A user's history: one small file in the state directory, read and replaced as a whole.

Reading takes no lock: a reader sees the old file or the new one. A change reads, edits and writes
under one lock (file_lock.py), since another run's write in between would be lost. A file that
cannot be read or written fails no run.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from saferun.base import files
from saferun.errors import UnavailableError
from saferun.journal import file_lock
from saferun.journal.disk import BoundedDisk
from saferun.model import as_tree
from saferun.system import paths

SCHEMA = 1
ENTRIES = 500  # number of newest ones that are kept
LOCK_S = 5.0  # longest wait of a change for other processes' changes, which take ms
DISK_S = 8.0  # … and for the whole change: a dead NFS mount never answers


class Dated(Protocol):
    """An entry of a history."""

    @property
    def at(self) -> float:
        """Return seconds since the epoch."""


T = TypeVar("T", bound=Dated)


class HistoryFile(Generic[T]):
    """One history.

    Args:
        name: name of the file, without its suffix, and of its content.
        key: JSON key of the entries in the file.
        entry: makes an entry from a JSON value; raises ValueError, TypeError, KeyError or
            AttributeError.
    """

    def __init__(self, name: str, key: str, entry: Callable[[Mapping[str, Any]], T]) -> None:
        self._name, self._key, self._entry = name, key, entry

    def path(self, environ: Mapping[str, str]) -> str:
        """Return the path of the user's history."""
        return os.path.join(paths.state_dir(environ), f"{self._name}.json")

    def load(self, environ: Mapping[str, str]) -> tuple[T, ...]:
        """Return the whole history; () if the file is missing, cut or not ours."""
        content = files.read_private(self.path(environ))
        try:
            document = json.loads(content or b"null")
            if document["schema"] != SCHEMA:
                return ()
            return tuple(self._entry(item) for item in document[self._key])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return ()

    def change(
        self, environ: Mapping[str, str], edit: Callable[[tuple[T, ...]], tuple[T, ...]]
    ) -> tuple[T, ...]:
        """Read, change and write the history as one atomic step between processes.

        Args:
            environ: variables that give the history's directory.
            edit: function from all entries to those to keep; called in another thread.

        Returns:
            The entries before the change.

        Raises:
            OSError: nothing was changed: another process holds the lock (after LOCK_S), the
                directory cannot be written, or the disk does not answer (after DISK_S).
        """
        before: list[tuple[T, ...]] = []
        file = self.path(environ)

        def work() -> None:
            if not paths.private_dir(os.path.dirname(file)):
                raise OSError(errno.EACCES, "its directory cannot be used", os.path.dirname(file))
            with file_lock.exclusive(f"{file}.lock", LOCK_S):
                before.append(self.load(environ))
                after = edit(before[0])
                if after != before[0] and not paths.write_private(file, self._document(after)):
                    raise OSError(errno.EACCES, "it cannot be written", file)

        if problem := BoundedDisk().do(work, DISK_S):
            raise problem
        return before[0]

    def forget(
        self, environ: Mapping[str, str], edit: Callable[[tuple[T, ...]], tuple[T, ...]]
    ) -> tuple[T, ...]:
        """Change the history at the user's request; arguments and result are those of `change`.

        Raises:
            UnavailableError: the history cannot be changed.
        """
        try:
            return self.change(environ, edit)
        except OSError as error:
            what = f"{self._name} cannot be forgotten: {error.strerror}"
            raise UnavailableError(what, where=self.path(environ), fix="fix its mode") from error

    def _document(self, entries: tuple[T, ...]) -> bytes:
        newest = sorted(entries, key=lambda entry: entry.at)[-ENTRIES:]
        return json.dumps({"schema": SCHEMA, self._key: as_tree(tuple(newest))}, indent=1).encode()
