"""The door: a launch goes straight to its plan; only commands load click.

`saferun …`, `saferun run …` and `python -m saferun …` all come here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

TYPE_CHECKING = False  # importing typing for it would cost `--help` 4 ms
if TYPE_CHECKING:
    from saferun.gather import Gathered
    from saferun.model import CommandLine, LaunchPlan
    from saferun.supervise import Pace

COMMANDS = ("run", "plan", "gen-shell", "env", "profiles", "diagnose", "doctor", "runs")


def main(words: Sequence[str] | None = None) -> int:
    """Run saferun and return its exit status (a launch does not return: it becomes the job)."""
    words = sys.argv[1:] if words is None else words
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads us: no traceback at exit
        return 141
    except Exception as error:
        return report(error)


def _dispatch(words: Sequence[str]) -> int:
    if words and words[0] in COMMANDS and words[0] != "run":
        from saferun.cli import commands

        return commands(words)
    if not words or words[0] in ("--help", "-h", "--version"):
        from saferun.front import front

        return front(words)
    return launch(words[1:] if words[0] == "run" else words, os.environ)


def launch(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start what the words ask for; returns the job's status, unless it is replaced by the job."""
    from saferun import gather

    request = gather.read(words, environ)
    cwd = gather.working_directory()
    if request.dry_run:
        from saferun.cli import show_plan

        return show_plan(request, environ, cwd, as_json=False)
    return carry_out(gather.start(request, environ, cwd), cwd)


def carry_out(gathered: Gathered, cwd: str, pace: Pace | None = None) -> int:
    """Start what was gathered; `pace` is `supervise`'s.

    Raises:
        SaferunError: the caller prints it.
    """
    from saferun import gather
    from saferun.launch import check_script, replace_process

    request, environ = gathered.request, gathered.environ
    plan = gathered.plan()
    if request.line.refusal is not None or "help" in request.line.given:
        _advise(request.line)
        return replace_process(plan, environ)
    if gather.disabled(environ):
        return replace_process(plan, environ)
    check_script(request.line.script, request.line.given, environ, cwd)
    if plan.supervised:
        from saferun.supervise import supervise

        return supervise(gathered, plan, say, pace)
    return _become(gathered, plan)


def _become(gathered: Gathered, plan: LaunchPlan) -> int:
    """Be replaced by the job, which keeps our locks."""
    from saferun.errors import EXIT_UNAVAILABLE
    from saferun.launch import begin_preflight, replace_process, take_locks
    from saferun.page import announcement

    held = take_locks(gathered, plan, say)
    check = begin_preflight(gathered, plan, held, say)
    say(announcement(plan))
    if check:
        with check:
            if not check.given():
                held.close()
                return EXIT_UNAVAILABLE
    held.inheritable()
    return replace_process(plan, {**gathered.environ, **held.environ()})


def say(text: str) -> None:
    """Write `saferun:` lines on stderr; a stderr that is closed or gone stops no job."""
    try:
        lines = [f"saferun: {line}" if line else "" for line in text.splitlines()]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return


def _advise(line: CommandLine) -> None:
    from saferun.torchrun import launch_only

    say(launch_only(line) or "")


def report(error: Exception) -> int:
    """Say what went wrong: one line for a person's mistake, everything for ours."""
    from saferun.errors import EXIT_SOFTWARE, SaferunError

    if isinstance(error, SaferunError):
        say(str(error).replace("\n", " "))
        return error.code
    import traceback

    traceback.print_exception(error)
    say(
        "this is a fault of saferun's own; SAFERUN_DISABLE=1 runs torchrun without it. "
        "Please report it with the lines above."
    )
    return EXIT_SOFTWARE


if __name__ == "__main__":
    sys.exit(main())
