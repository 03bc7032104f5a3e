"""Mark unfinished trials of an ended run as failed, so that none counts as running.

The next process of a run does this itself (inject/hooks/optuna/account.py). If there is no next
process, the job's own Python is started once more: saferun's environment may have no Optuna.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from saferun.base import files, untrusted
from saferun.system import command

TIMEOUT_S = 60.0  # for the import of Optuna, and a database that others write to
_CODE = "from _saferun.inject.hooks.optuna import sweep; sweep.main()"
_MAX_BYTES = 64 << 20


def fail_left_over(
    state: str, python: str, environ: Mapping[str, str], status: int, say: Callable[[str], None]
) -> None:
    """Fail the trials that the last process of a run has left in its study's storage.

    Args:
        state: directory that the run's processes shared.
        python: the job's Python.
        environ: the job's environment.
        status: exit status of the failed run.
        say: function that takes lines for people.
    """
    if not _is_any_left(state):
        return
    done = command.run((python, "-c", _CODE, str(status)), environ, TIMEOUT_S)
    if done.trouble:
        say(f"trials may still be marked as running in their study: {done.trouble}")


def _is_any_left(state: str) -> bool:
    """Return whether a process has left a trial that it has not finished."""
    for name in os.listdir(state):
        if name.startswith("optuna-") and name.endswith(".jsonl"):
            begun: set[object] = set()
            content = files.read_private(os.path.join(state, name), _MAX_BYTES) or b""
            for line in untrusted.objects(content):
                if "study" in line:
                    begun.clear()
                if "id" in line:
                    begun -= {line.get("start")}
                begun |= {line.get("id", line.get("start"))}
                begun -= {None, line.get("end"), line.get("left")}
            if begun:
                return True
    return False
