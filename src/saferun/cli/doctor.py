"""`saferun doctor`: is this machine fit?"""

from __future__ import annotations

import os
import sys

import click

from saferun.cli.options import AS_JSON, HELP, echo_json
from saferun.doctor import examination, view
from saferun.planning import inputs
from saferun.system import paths
from saferun.system.redact import Masker
from saferun.system.stderr import say


@click.command(context_settings=HELP)
@AS_JSON
@click.option("--full", is_flag=True, help="Measure the GPUs too: a minute at full load.")
@click.option("--recover", is_flag=True, help="First bring GPUs back into use, as far as allowed.")
def command(as_json: bool, full: bool, recover: bool) -> int:
    """Check the machine and its GPUs before a job does; exit 1 where there is a problem."""
    if elsewhere := paths.foreign_home(os.environ):
        say(elsewhere)
    cwd = inputs.working_directory()
    known = examination.examine(os.environ, cwd, recover=recover)
    if full:
        known = examination.measure(known, os.environ)
    if as_json:
        mask = Masker(os.environ, ()).text
        echo_json(view.as_json(known.findings, known.vitals, mask))
    else:
        # sys.stdout is None if the descriptor is closed.
        at_terminal = sys.stdout is not None and sys.stdout.isatty()
        colour = at_terminal and not os.environ.get("NO_COLOR")
        text = view.render(known.findings, colour=colour)
        encoding = (sys.stdout and sys.stdout.encoding) or "utf-8"  # a driver's message may not fit
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    return examination.status(known.findings)
