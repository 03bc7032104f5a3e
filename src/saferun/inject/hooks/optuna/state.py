"""Files in a run's `state` by which its processes tell each other about its trials.

    trials.jsonl          one JSON object for each finished trial; `saferun runs show` reads it
    progress              one byte for each finished trial: see contract.py
    optuna-*.jsonl        which trials of a study are this run's, appended: see account.py
    optuna-script.json    what the script has done once, replaced as a whole: see script.py

Other processes of the job do not write these files. A failed write raises OSError.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from ....base import files, untrusted
from ... import contract, cut, receipts
from ...context import Context

TRIALS = "trials.jsonl"
_MAX_BYTES = 64 << 20  # limit of trials.jsonl; 5000 trials take about 2 MB
_MAX_TEXT = 200  # most characters of a parameter's value
_MAX_PARAMS = 200
_BESIDE_TRIES, _BESIDE_WAIT_S = 20, 0.1  # 2 s: after that the other worker has not got so far
_WORKER = os.environ.get("SAFERUN_WORKER", "")  # value at the start: a script may clear it


class State:
    """The directory of one run and worker, for the process of one attempt."""

    def __init__(self, directory: str, context: Context) -> None:
        self._directory = directory
        self.attempt = context.attempt
        self.previous = context.previous  # exit status of the previous process, or None
        self._full = False

    def read(self, name: str) -> dict[str, Any]:
        """Return what was written under a name; {} if nothing can be read."""
        return _read(self._path(name))

    def write(self, name: str, entry: Mapping[str, Any]) -> None:
        """Replace the content under a name: a reader finds the old or the new content, complete."""
        files.replace(self._path(name), json.dumps(entry, separators=(",", ":")).encode())

    def append(self, name: str, line: Mapping[str, Any]) -> int:
        """Append one line in one write; return the size of the file."""
        text = json.dumps(line, default=str, separators=(",", ":"))
        return files.append(self._path(name), text.encode() + b"\n")

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a file, except one during whose write the process was killed."""
        return list(untrusted.objects(files.read(self._path(name), 2 * _MAX_BYTES)))

    def wait_beside(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> bool:
        """Return whether another worker's content under a name passes a test within 2 s.

        Args:
            name: the file's name.
            holds: the test for the content.
        """
        own = os.path.dirname(self._directory)
        if not os.path.basename(own).startswith("worker-"):
            return False
        run = os.path.dirname(own)
        for _ in range(_BESIDE_TRIES):
            for worker in os.listdir(run):
                path = os.path.join(run, worker, os.path.basename(self._directory), name)
                if worker.startswith("worker-") and holds(_read(path)):
                    return True
            time.sleep(_BESIDE_WAIT_S)
        return False

    def studies(self) -> list[str]:
        """Return the names of the files that list which trials of a study belong to this run."""
        names = sorted(os.listdir(self._directory))
        return [name for name in names if name.startswith("optuna-") and name.endswith(".jsonl")]

    def progress(self) -> None:
        """Count a finished trial for the loop of attempts."""
        files.append(self._path(contract.PROGRESS), b".")

    def record(self, trial: Mapping[str, Any]) -> None:
        """Append a finished trial; the file stops growing at 64 MiB."""
        if not self._full:
            head = {"v": 1, "at": receipts.now(), "attempt": self.attempt, "worker": _WORKER}
            self._full = self.append(TRIALS, {**head, **trial}) > _MAX_BYTES

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)


def _read(path: str) -> dict[str, Any]:
    return untrusted.mapping(untrusted.value(files.read(path, _MAX_BYTES)))


def shown(params: Mapping[str, Any]) -> dict[str, object]:
    """Return parameters for the record: short, and without the credentials in an address."""
    return {str(name): _value(value) for name, value in list(params.items())[:_MAX_PARAMS]}


def file_name(study: str) -> str:
    """Return the name of the file that lists which trials of a study belong to this run."""
    digest = hashlib.sha256(study.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"optuna-{digest}.jsonl"


def _value(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = cut.beginning(str(value), _MAX_TEXT)
    scheme, found, rest = text.partition("://")
    if found and "@" in rest:
        return f"{scheme}://…@{rest.rpartition('@')[2]}"
    return text
