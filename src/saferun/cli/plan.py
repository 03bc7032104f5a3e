"""`saferun plan` and `--dry-run`: show what would run; start nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping

import click

from saferun.audit import collect
from saferun.cli.options import TORCHRUN_ARGUMENTS, echo, echo_json
from saferun.model import Request
from saferun.planning import inputs, view
from saferun.planning.request import read_command
from saferun.planning.torchrun import torchrun_args
from saferun.supervise.changes.resumption import resumed_now


@click.command(context_settings=TORCHRUN_ARGUMENTS)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def command(argv: tuple[str, ...]) -> int:
    """Show what would run; nothing is started. Takes the arguments of a launch, and --json."""
    if argv in (("--help",), ("-h",)):
        echo("Usage: saferun plan [--json] [ARGUMENTS OF A LAUNCH]...\n")
        echo("Show what would run; nothing is started and nothing need exist.")
        return 0
    as_json, request = read_command(argv, os.environ)
    return show_plan(request, os.environ, inputs.working_directory(), as_json=as_json)


def show_plan(request: Request, environ: Mapping[str, str], cwd: str, *, as_json: bool) -> int:
    """Print the plan of a request and start nothing.

    Args:
        request: the arguments of the launch.
        environ: the user's variables.
        cwd: the working directory.
        as_json: print JSON instead of text.

    Returns:
        The exit status.

    Raises:
        UsageError: torchrun would refuse these arguments; the message is torchrun's.
    """
    gathered = inputs.gather(request, environ, cwd)
    inputs.check_accepted(gathered)
    plan = gathered.plan()
    notes: list[str] = []
    resumed = resumed_now(gathered, notes.append)
    if as_json:
        shown = {**view.as_json(plan), "resumed": view.resumed_json(resumed, notes)}
        echo_json(shown)
    elif inputs.disabled(environ):
        echo(view.as_text(plan))
    else:
        findings = collect.findings(gathered.request, gathered.facts, environ, cwd)
        line = gathered.request.line
        variables = {} if gathered.starts_python else torchrun_args.exported(line, environ)
        echo(view.as_text(plan, findings, variables))
        if text := view.resumed_text(resumed, notes):
            echo(text.removesuffix("\n"))
    return 0
