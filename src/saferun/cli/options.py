"""Options and settings of click that several commands share."""

from __future__ import annotations

import click

# click passes the arguments of a launch on as they are; plan/torchrun_args.py reads them.
TORCHRUN_ARGUMENTS = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
HELP = {"help_option_names": ["-h", "--help"]}

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
RUN_DIR = click.option("--run-dir", metavar="DIR", help="Where runs are; else SAFERUN_RUN_DIR.")
