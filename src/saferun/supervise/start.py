"""Start a LaunchPlan: check what it names, take its locks, be replaced by it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from saferun.errors import UnavailableError, UsageError
from saferun.installed import on_path
from saferun.model import LaunchPlan

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.clearance import Clearance
    from saferun.gather import Gathered
    from saferun.lock import Held


def check_script(
    script: str | None, given: Mapping[str, str], environ: Mapping[str, str], cwd: str
) -> None:
    """Refuse a script that is not there before anything is started.

    A module (`-m`) is the interpreter's to find, and with PYTHON_EXEC the words mean what that
    program takes them for.

    Raises:
        UsageError: no such file.
    """
    if script is None or "module" in given or "PYTHON_EXEC" in environ:
        return
    if "no_python" in given and "run_path" not in given:
        if "/" in script:
            found = os.access(os.path.join(cwd, script), os.X_OK)
        else:
            found = any(on_path(script, environ))
        if not found:
            raise UsageError(f"there is no program `{script}`", mend="check the path and its mode")
        return
    if not os.path.exists(os.path.join(cwd, script)):
        raise UsageError(f"there is no script `{script}`", where=f"in {cwd}", mend=_other(script))


def _other(script: str) -> str:
    from saferun.__main__ import COMMANDS

    if script in COMMANDS:
        return f"for the command, put it first: saferun {script} …"
    return "check the path, or use -m for a module"


def plug_closed_descriptors() -> None:
    """Put /dev/null where 0, 1 or 2 is closed: what is opened next would be taken for the job's.

    It is not inherited: after an exec they are as closed as they were.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        continue
    os.close(fd)


def take_locks(gathered: Gathered, plan: LaunchPlan, say: Callable[[str], None]) -> Held:
    """Lock the GPUs as the plan says.

    Raises:
        BusyError: another run has one, and the policy is to leave then.
    """
    from saferun import holders, lock

    plug_closed_descriptors()  # or a lock file would become the job's output
    script = plan.script or "no script"
    return lock.acquire(
        plan.locks["devices"],
        plan.locks,
        environ=gathered.environ,
        owner=holders.this_process(os.path.basename(script), gathered.identity.run),
        say=say,
    )


def begin_preflight(
    gathered: Gathered, plan: LaunchPlan, held: Held, say: Callable[[str], None]
) -> Clearance | None:
    """Begin to try the GPUs, where the profile wants that; whoever calls this closes it."""
    if plan.policy["preflight"]["mode"] == "off":
        return None
    from saferun import clearance

    return clearance.begin(gathered, plan, held, say)


def environment(plan: LaunchPlan, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the job: the user's own with the plan's on top."""
    return {**environ, **{name: setting.value for name, setting in plan.env.items()}}


def replace_process(plan: LaunchPlan, environ: Mapping[str, str]) -> NoReturn:
    """Become the job: same pid, nothing of ours left.

    Raises:
        UnavailableError: the program cannot be executed.
    """
    program = plan.command[0]
    path = program if "/" in program else next(on_path(program, environ), None)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the caller
            stream.flush()
    try:
        os.execve(path or program, plan.command, environment(plan, environ))  # noqa: S606
    except OSError as error:
        raise UnavailableError(
            f"cannot start `{program}`: {error.strerror}", mend="check the program and its mode"
        ) from None
