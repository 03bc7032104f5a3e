"""What several commands take."""

from __future__ import annotations

import click

# Words of a launch pass as they are: torchrun's grammar reads them, not click's.
TORCHRUN_WORDS = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}
HELP = {"help_option_names": ["-h", "--help"]}

AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
RUN_DIR = click.option("--run-dir", metavar="DIR", help="Where runs are; else SAFERUN_RUN_DIR.")
