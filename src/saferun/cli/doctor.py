"""`saferun doctor`: is this machine fit?"""

from __future__ import annotations

import json
import os
import shutil
import sys

import click

from saferun.cli.options import AS_JSON, HELP
from saferun.plan import inputs


@click.command(context_settings=HELP)
@AS_JSON
@click.option("--full", is_flag=True, help="Measure the GPUs too: a minute at full load.")
@click.option("--recover", is_flag=True, help="First bring GPUs back into use, as far as allowed.")
def command(as_json: bool, full: bool, recover: bool) -> int:
    """Check the machine and its GPUs before a job does; exit 1 where there is a problem."""
    from saferun.doctor import examination
    from saferun.doctor import view as page
    from saferun.system.redact import Masker

    cwd = inputs.working_directory()
    known = examination.examine(os.environ, cwd, recover=recover)
    if full:
        known = examination.measure(known, os.environ)
    if as_json:
        mask = Masker(os.environ, ()).text
        told = page.as_json(known.findings, known.vitals, mask)
        click.echo(json.dumps(told, indent=2))
    else:
        to_people = sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
        columns = shutil.get_terminal_size().columns if to_people else page.WIDTH
        colour = to_people and not os.environ.get("NO_COLOR")
        text = page.page(known.findings, colour=colour, columns=columns)
        encoding = (sys.stdout and sys.stdout.encoding) or "utf-8"  # a driver's words may not fit
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    return examination.status(known.findings)
