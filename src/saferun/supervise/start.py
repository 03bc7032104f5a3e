"""Start a LaunchPlan: check the script, then supervise the job or be replaced by it."""

from __future__ import annotations

import os

from saferun.errors import UnavailableError, UsageError
from saferun.model import LaunchPlan
from saferun.planning import inputs
from saferun.planning.inputs import RunInputs
from saferun.planning.other_launchers import hint
from saferun.planning.own_variables import OF_ATTEMPT, needed_beside
from saferun.planning.torchrun.torchrun_args import COMMANDS, advice
from saferun.planning.view import announcement
from saferun.supervise import debugger
from saferun.supervise.attempt.end_requests import restore_child_ends
from saferun.supervise.changes.resumption import first_plan
from saferun.supervise.gpu_gate import GpuCare, take_locks
from saferun.supervise.replace import become_job, check_size, replace_process
from saferun.system import procfs
from saferun.system.paths import on_path
from saferun.system.spelling import nearest
from saferun.system.stderr import say


def check_script(gathered: RunInputs, cwd: str) -> None:
    """Check that the script exists, before anything is started.

    Three cases are not checked: a module (`-m`), which the interpreter finds; arguments with
    PYTHON_EXEC, which that program interprets; and `-`, by which python reads its script from
    stdin.

    Args:
        gathered: the inputs of the plan.
        cwd: the working directory.

    Raises:
        UsageError: there is no such file.
    """
    request, environ = gathered.request, gathered.environ
    script, options = request.line.script, request.options
    if script is None or options.module or options.code:
        return
    if script == "-" if gathered.starts_python else "PYTHON_EXEC" in environ:
        return
    if options.no_python and not options.run_path:
        if "/" in script:
            found = os.access(os.path.join(cwd, script), os.X_OK)
        else:
            found = any(on_path(script, environ))
        if not found:
            raise UsageError(f"there is no program `{script}`", fix="check the path and its mode")
        return
    if not os.path.exists(os.path.join(cwd, script)):
        raise UsageError(
            f"there is no script `{script}`", where=f"in {cwd}", fix=_suggest(script, cwd)
        )


def _suggest(script: str, cwd: str) -> str:
    if text := hint(script):
        return text
    if script in COMMANDS:
        return f"for the command, put it first: saferun {script} …"

    folder, name = os.path.split(script)
    try:
        files = os.listdir(os.path.join(cwd, folder))
    except OSError:
        files = []
    same = [file for file in files if os.path.splitext(file)[1] == os.path.splitext(name)[1]]
    if close := nearest(name, same):
        return f"did you mean `{os.path.join(folder, close)}`?"
    if script.isalpha() and (close := nearest(script, COMMANDS)):
        return f"did you mean the command `saferun {close}`?"
    return "check the path, or use -m for a module"


def carry_out(gathered: RunInputs, cwd: str) -> int:
    """Start a run.

    Args:
        gathered: the inputs of its plans.
        cwd: the working directory.

    Returns:
        The exit status of the run; does not return if the job replaces this process.

    Raises:
        SaferunError: the caller prints it.
    """
    request, environ = gathered.request, gathered.environ
    if request.line.refusal is not None or "help" in request.line.given:
        say(advice(request.line))
        return replace_process(gathered.plan(), environ, gathered.launcher)
    if inputs.disabled(environ):
        return replace_process(gathered.plan(), environ, gathered.launcher)
    restore_child_ends()
    check_script(gathered, cwd)
    if gathered.supervised and (why := _unsupervised(gathered)):
        plan = first_plan(gathered, say)
        say(why)
        env = {name: value for name, value in plan.env.items() if name not in OF_ATTEMPT}
        return _become(gathered, plan._replace(env=env))
    if gathered.profile is not None and gathered.profile.settings.workers > 1:
        from saferun.supervise.workers import worker_pool  # only for several workers

        return worker_pool.supervise(gathered, say)
    if gathered.supervised or debugger.in_notebook():  # else it would replace the kernel
        from saferun.supervise.loop import supervise  # 60 ms, saved if the job replaces us

        return supervise(gathered, say)

    return _become(gathered, first_plan(gathered, say))


def _unsupervised(gathered: RunInputs) -> str:
    """Return why a run must do without supervision, as a line for the user; "" if it need not.

    Raises:
        UnavailableError: a key needs what is missing.
    """
    assert gathered.profile is not None
    keys = ", ".join(needed_beside(gathered.profile.settings))
    if missing := procfs.missing():
        what = f"{missing}, by which saferun finds a job's processes"
        if keys:
            raise UnavailableError(
                what, where=f"needed for {keys}", fix="mount /proc, or leave that setting out"
            )
        return f"{what}: the job is not supervised, and there is one attempt"
    if tool := debugger.follower():
        lost = f"; this does not hold: {keys}" if keys else ""
        return (
            f"{tool} runs saferun and follows the processes that it starts, so the job runs in "
            f"this process, not supervised, and there is one attempt{lost}"
        )
    return ""


def _become(gathered: RunInputs, plan: LaunchPlan) -> int:
    """Replace this process by the job, which inherits our locks."""
    check_size(plan, gathered.environ)
    with take_locks(gathered, say) as held:
        care = GpuCare(gathered, plan, held, say)
        say(announcement(plan))
        return become_job(gathered, plan, held, care)
