"""The list of modules that a script's ranks import, kept from one start to the next.

A rank writes it beside its receipt (inject/imported_modules.py); the start of a later attempt or
run imports the modules in it. It is optional: if it cannot be read or written, ranks are forked
from a process that has imported only torch.
"""

from __future__ import annotations

import contextlib
import os
from binascii import crc32

from saferun.inject.imported_modules import ENDING
from saferun.model import LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.system import paths


class RankImports:
    """The list of one script.

    Args:
        plan: the plan of the first attempt, which names the script.
        gathered: the run's inputs, which name the launcher's Python and the user's cache directory.
    """

    def __init__(self, plan: LaunchPlan, gathered: RunInputs) -> None:
        script, launcher = plan.script or "", gathered.launcher
        python = (launcher and launcher.interpreter) or plan.command[0]
        name = script if plan.options.module else os.path.realpath(script)
        key = "-".join(f"{crc32(os.fsencode(path)):08x}" for path in (python, name))
        self.path = os.path.join(paths.cache_dir(gathered.environ), "imports", key)
        self._receipts = gathered.identity.receipts

    def known(self, attempt: int) -> bool:
        """Return whether there is a list from this attempt or an earlier one."""
        self.take(attempt)
        return os.path.exists(self.path)

    def take(self, attempt: int) -> None:
        """Store the list that a rank of this attempt has written, if there is one."""
        with contextlib.suppress(OSError):
            for entry in os.scandir(self._receipts or ""):
                if entry.name.startswith(f"a{attempt}-") and entry.name.endswith(ENDING):
                    with open(entry.path, "rb") as file:
                        paths.write_private(self.path, file.read())
