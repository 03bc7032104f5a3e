"""The entry point; a launch goes directly to its plan, and only commands import click.

Each of these paths imports only what it needs: `--help` takes 25 ms, a launch 200.

`saferun …`, `saferun run …` and `python -m saferun …` all start here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from saferun import __version__
from saferun.errors import EXIT_USAGE
from saferun.system.descriptors import plug_closed_descriptors


def main(argv: Sequence[str] | None = None) -> int:
    """Run saferun and return its exit status; an unsupervised job replaces it and never returns."""
    ours = argv is None  # else another program imports this module and owns the process
    if ours:
        plug_closed_descriptors()  # before an import opens a file: ctypes may, for libffi 3.5 does
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        from saferun.system.stderr import die_of_interrupt

        return die_of_interrupt() if ours else 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the flush at exit raises it again
        return 141
    except Exception as error:
        from saferun.system.stderr import report

        return report(error)


def _dispatch(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("--help", "-h", "--version"):
        return _front(argv)
    from saferun.planning.torchrun.torchrun_args import COMMANDS

    if argv[0] in COMMANDS and argv[0] != "run":
        from saferun.cli.commands import commands

        return commands(argv)
    return launch(argv[1:] if argv[0] == "run" else argv, os.environ)


def _front(argv: Sequence[str]) -> int:
    """Print the version, the help, or what a shell asks for to complete a line.

    Without arguments the help goes to stderr, as for an error.
    """
    if not argv and (asked := os.environ.get("_SAFERUN_COMPLETE")):
        from saferun.cli.completion import answer

        return answer(asked)
    if argv and argv[0] == "--version":
        sys.stdout.write(f"saferun {__version__}\n")
        return 0
    from saferun.cli.usage import HELP

    (sys.stdout if argv else sys.stderr).write(HELP)
    return 0 if argv else EXIT_USAGE


def launch(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Launch a job and return its exit status; an unsupervised job replaces this process."""
    from saferun.planning import inputs
    from saferun.planning.request import read
    from saferun.supervise.start import carry_out
    from saferun.system.stderr import settle

    request = read(argv, environ)
    cwd = inputs.working_directory()
    if request.dry_run:
        from saferun.cli.plan import show_plan

        return show_plan(request, environ, cwd, as_json=False)
    status = carry_out(inputs.gather(request, environ, cwd, starting=True), cwd)
    settle()
    return status


if __name__ == "__main__":
    sys.exit(main())
