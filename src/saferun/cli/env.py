"""`saferun env`: the profile's variables as `export` lines for eval."""

from __future__ import annotations

import os

import click

from saferun.cli.completers import profile_names
from saferun.cli.options import HELP, echo
from saferun.export.shell_script import exports
from saferun.planning import inputs
from saferun.planning.request import read


@click.command(context_settings=HELP)
@click.option(
    "--profile",
    metavar="NAME|FILE",
    help="The profile; else SAFERUN_PROFILE, detected.",
    shell_complete=profile_names,
)
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Any profile key.")
def command(profile: str | None, sets: tuple[str, ...]) -> int:
    """Print `export` lines for eval: eval "$(saferun env --profile h100)"."""
    options = [
        *(["--profile", profile] if profile else []),
        *(w for s in sets for w in ("--set", s)),
    ]
    try:
        request = read([*options, "SCRIPT"], os.environ)
        plan = inputs.gather(request, os.environ, inputs.working_directory()).plan()
    except Exception:
        click.echo("false")  # so that the eval fails too
        raise
    click.echo(exports(plan), nl=False, color=True)  # else click removes escapes from values
    for remark in plan.remarks:
        echo(f"saferun: {remark}", err=True)
    return 0
