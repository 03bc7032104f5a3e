"""The door: a launch goes straight to its plan; only commands load click.

`saferun …`, `saferun run …` and `python -m saferun …` all come here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence


def main(words: Sequence[str] | None = None) -> int:
    """Run saferun and return its exit status (a launch does not return: it becomes the job)."""
    words = sys.argv[1:] if words is None else words
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nobody reads us: no traceback at exit
        return 141
    except Exception as error:
        from saferun.system.stderr import report

        return report(error)


def _dispatch(words: Sequence[str]) -> int:
    if not words or words[0] in ("--help", "-h", "--version"):
        from saferun.cli.help import front

        return front(words)
    from saferun.plan.torchrun_args import COMMANDS

    if words[0] in COMMANDS and words[0] != "run":
        from saferun.cli.commands import commands

        return commands(words)
    return launch(words[1:] if words[0] == "run" else words, os.environ)


def launch(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Start what the words ask for; returns the job's status, unless it is replaced by the job."""
    from saferun.plan import inputs
    from saferun.plan.request import read
    from saferun.supervise.start import carry_out

    request = read(words, environ)
    cwd = inputs.working_directory()
    if request.dry_run:
        from saferun.cli.plan import show_plan

        return show_plan(request, environ, cwd, as_json=False)
    return carry_out(inputs.start(request, environ, cwd), cwd)


if __name__ == "__main__":
    sys.exit(main())
