"""Replace this process by the job, which gets its pid."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Mapping
from typing import NoReturn

from saferun.errors import EXIT_UNAVAILABLE, UnavailableError
from saferun.gpu.lock.gpu_locks import Held
from saferun.model import LaunchPlan
from saferun.planning import exec_limit
from saferun.planning.inputs import RunInputs
from saferun.planning.torchrun import torchrun_install
from saferun.planning.torchrun.torchrun_install import Launcher
from saferun.supervise import debugger
from saferun.supervise.gpu_gate import GpuCare
from saferun.system.paths import on_path


def check_size(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Check, before anything is started, that the kernel will accept the job's environment.

    Raises:
        UnavailableError: it would not, because of variables that saferun sets.
    """
    env = plan.environment(environ)
    if exec_limit.size(plan.command, env) + exec_limit.RANK_BYTES <= exec_limit.ALWAYS_BYTES:
        return

    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    most = exec_limit.limit(None if stack == resource.RLIM_INFINITY else stack)
    if found := exec_limit.excess(plan, environ, most):
        raise UnavailableError(
            f"the environment is too large: {found}",
            fix="unset what the job does not need, raise the limit (ulimit -s), or use "
            "SAFERUN_DISABLE=1",
        )


def replace_process(
    plan: LaunchPlan, environ: Mapping[str, str], launcher: Launcher | None = None
) -> NoReturn:
    """Execute the job in this process; nothing of saferun remains beside it.

    Where a debugger or tracer runs saferun in its own process, the job's Python program runs there.

    Args:
        plan: the plan of the only attempt.
        environ: the user's environment.
        launcher: torchrun; None if plain python starts the job.

    Raises:
        UnavailableError: the program cannot be executed.
    """
    if debugger.around():
        plan = plan._replace(command=_as_python(plan.command, launcher))
        python, *rest = plan.command
        rest = rest[rest[:1] == ["-P"] :]
        runs_here = rest and (rest[0] == "-m" or not rest[0].startswith("-"))
        if runs_here and torchrun_install.is_our_environment(python):
            env = plan.environment(environ)
            debugger.run_here(rest, env, is_agent=launcher is not None)
    program = plan.command[0]
    path = program if "/" in program else next(on_path(program, environ), None)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if the caller closed it
            stream.flush()
    try:
        os.execve(path or program, plan.command, plan.environment(environ))  # noqa: S606 (no shell is what we want)
    except OSError as error:
        raise UnavailableError(
            f"cannot start `{program}`: {error.strerror}", fix="check the program and its mode"
        ) from None


def _as_python(command: tuple[str, ...], launcher: Launcher | None) -> tuple[str, ...]:
    """Return a command with the Python of torchrun's first line, by which debuggers know it."""
    if launcher is None or launcher.interpreter is None or len(launcher.argv) > 1:
        return command
    flags = (f"-{launcher.flags}",) if launcher.flags else ()
    return (launcher.interpreter, *flags, *command)


def become_job(gathered: RunInputs, plan: LaunchPlan, held: Held, care: GpuCare) -> int:
    """Execute the job in this process after the GPU test; the process keeps the locks.

    Args:
        gathered: the inputs of the run.
        plan: the plan of its only attempt.
        held: the run's locks.
        care: tests the GPUs, and is closed here.

    Returns:
        The exit status if the GPUs failed the preflight test.

    Raises:
        UnavailableError: the program cannot be executed.
    """
    try:
        test = care.tested("")
    finally:
        care.close()
    if test and not test.granted:
        return EXIT_UNAVAILABLE
    held.inheritable()
    return replace_process(plan, {**gathered.environ, **held.environ()}, gathered.launcher)
