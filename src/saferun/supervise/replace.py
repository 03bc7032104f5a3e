"""Replacing this process by the job, which gets its pid."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from saferun.errors import UnavailableError
from saferun.model import LaunchPlan
from saferun.system.paths import on_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def replace_process(plan: LaunchPlan, environ: Mapping[str, str]) -> NoReturn:
    """Execute the job in this process; nothing of saferun is left beside it.

    Raises:
        UnavailableError: the program cannot be executed.
    """
    program = plan.command[0]
    path = program if "/" in program else next(on_path(program, environ), None)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.flush()
    try:
        os.execve(path or program, plan.command, plan.environment(environ))  # noqa: S606 (no shell is what we want)
    except OSError as error:
        raise UnavailableError(
            f"cannot start `{program}`: {error.strerror}", fix="check the program and its mode"
        ) from None
