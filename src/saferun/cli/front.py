"""The output of `saferun`, `saferun --help` and `saferun --version`; imports nothing heavy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from saferun import __version__
from saferun.cli.front_page import HELP
from saferun.errors import EXIT_USAGE


def front(argv: Sequence[str]) -> int:
    """Print the version, the help, or what a shell asks for to complete a line.

    Without arguments the help goes to stderr, as for an error.
    """
    if not argv and (asked := os.environ.get("_SAFERUN_COMPLETE")):
        from saferun.cli.completion import answer  # it loads click

        return answer(asked)
    if argv and argv[0] == "--version":
        sys.stdout.write(f"saferun {__version__}\n")
        return 0
    (sys.stdout if argv else sys.stderr).write(HELP)
    return 0 if argv else EXIT_USAGE
