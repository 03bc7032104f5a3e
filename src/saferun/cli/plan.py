"""`saferun plan`, and `--dry-run`: what would run; nothing is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

import click

from saferun.cli.options import TORCHRUN_WORDS
from saferun.errors import UsageError
from saferun.model import Request
from saferun.plan import inputs
from saferun.plan.request import read_command


@click.command(context_settings=TORCHRUN_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> int:
    """Show what would run; nothing is started. Takes the words of a launch, and --json."""
    if words in (("--help",), ("-h",)):
        click.echo("Usage: saferun plan [--json] [WORDS OF A LAUNCH]...\n")
        click.echo("Show what would run; nothing is started and nothing need exist.")
        return 0
    as_json, request = read_command(words, os.environ)
    return show_plan(request, os.environ, inputs.working_directory(), as_json=as_json)


def show_plan(request: Request, environ: Mapping[str, str], cwd: str, *, as_json: bool) -> int:
    """Print the plan of a request and start nothing.

    Raises:
        UsageError: torchrun would refuse these words; the message is torchrun's.
    """
    from saferun.audit import collect
    from saferun.plan import view as page
    from saferun.plan.torchrun_args import launch_only

    line = request.line
    if line.refusal is not None:
        raise UsageError(f"torchrun would refuse this: {line.refusal}", fix=launch_only(line) or "")
    gathered = inputs.look(request, environ, cwd)
    plan = gathered.plan()
    if as_json:
        click.echo(json.dumps(page.as_json(plan), indent=2))
    elif inputs.disabled(environ):
        click.echo(page.as_text(plan))
    else:
        click.echo(page.as_text(plan, collect.findings(line, gathered.facts, environ, cwd)))
    return 0
