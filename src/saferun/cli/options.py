"""Options and settings of click that several commands share."""

from __future__ import annotations

import json
import os

import click

from saferun.planning import inputs
from saferun.system import paths
from saferun.system.printable import printable

# click passes the arguments of a launch on unchanged; planning/torchrun/torchrun_args.py parses
# them.
TORCHRUN_ARGUMENTS = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
HELP = {"help_option_names": ["-h", "--help"]}

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def runs_dir(context: click.Context, option: object, given: str | None) -> str:
    """Return the directory of runs that a command uses."""
    return paths.runs_dir(given, os.environ, inputs.working_directory())


RUN_DIR = click.option(
    *("--run-dir", "base"),
    callback=runs_dir,
    metavar="DIR",
    help="Where runs are; else SAFERUN_RUN_DIR.",
)


def echo(text: str, *, err: bool = False) -> None:
    """Print text for people without control characters: it may quote anybody's log or profile."""
    click.echo(printable(text, kept="\n\t"), err=err)


def echo_json(document: object) -> None:
    """Print JSON."""
    click.echo(json_text(document))


def json_text(document: object, indent: int | None = 2) -> str:
    """Return JSON in ASCII, so that no text in it reaches a terminal as a control character."""
    return json.dumps(document, indent=indent).replace("\x7f", "\\u007f")
