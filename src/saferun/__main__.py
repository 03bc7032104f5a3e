"""The entry point; a launch goes directly to its plan, and only commands import click.

`saferun …`, `saferun run …` and `python -m saferun …` all start here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run saferun and return its exit status; an unsupervised job replaces it and never returns."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # flushing at exit would raise it again
        return 141
    except Exception as error:
        from saferun.system.stderr import report

        return report(error)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "--version"):
        from saferun.cli.help import front

        return front(argv)
    from saferun.plan.torchrun_args import COMMANDS

    if argv[0] in COMMANDS and argv[0] != "run":
        from saferun.cli.commands import commands

        return commands(argv)
    return launch(argv[1:] if argv[0] == "run" else argv, os.environ)


def launch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Launch a job and return its exit status; an unsupervised job replaces this process."""
    from saferun.plan import inputs
    from saferun.plan.request import read
    from saferun.supervise.start import carry_out

    request = read(argv, environ)
    cwd = inputs.working_directory()
    if request.dry_run:
        from saferun.cli.plan import show_plan

        return show_plan(request, environ, cwd, as_json=False)
    return carry_out(inputs.start(request, environ, cwd), cwd)


if __name__ == "__main__":
    sys.exit(main())
