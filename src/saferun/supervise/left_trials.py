"""Trials that a run has left behind when it ended in the middle of them: failed, not running.

The next process of a run does this itself (inject/hooks/optuna_ledger.py). Where there is none, the
job's own Python is started once more: saferun's environment may have no Optuna.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

TIMEOUT_S = 60.0  # the import of Optuna, and a database that others write
_RUNNING = "-running.json"
_CODE = "from _saferun_inject.hooks import optuna_sweep; optuna_sweep.main()"
_MAX_BYTES = 1 << 20


def fail_left_over(
    state: str | None,
    python: str | None,
    environ: Mapping[str, str],
    status: int,
    say: Callable[[str], None],
) -> None:
    """Fail the trials that the last process of a run has left in its study's storage.

    Args:
        state: directory that the processes of the run shared; None for none.
        python: the job's; None where it is not known.
        environ: of its job.
        status: its exit status.
        say: takes lines for people.
    """
    if state is None or python is None or not status or not _is_any_left(state):
        return
    from saferun.system import command

    done = command.run((python, "-c", _CODE, str(status)), environ, TIMEOUT_S)
    if done.trouble:
        say(f"trials may still be marked as running in their study: {done.trouble}")


def _is_any_left(state: str) -> bool:
    """Return whether a process has noted a trial for which it has not accounted."""
    import json

    from saferun.system import paths

    for name in os.listdir(state):
        if not name.endswith(_RUNNING):
            continue
        account = name.replace(_RUNNING, ".json")
        try:
            notes, entry = (
                json.loads(paths.read_private(os.path.join(state, one), _MAX_BYTES) or b"{}")
                for one in (name, account)
            )
            known = {entry.get("last"), entry.get("last_start")} - {None}
            left = [note for note in notes["running"] if not known & set(note.values())]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if left:
            return True
    return False
