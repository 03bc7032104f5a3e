"""The output of `saferun`, `saferun --help` and `saferun --version`; imports nothing heavy."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from saferun import __version__
from saferun.errors import EXIT_USAGE

HELP = """\
Usage: saferun [SAFERUN OPTIONS | TORCHRUN OPTIONS]... SCRIPT [ARGS]...
       saferun COMMAND ...

Stands where torchrun stands: every option of torchrun means here what it means there
(torchrun --help lists them).

Saferun's own options, before SCRIPT:
  --profile NAME|FILE   settings for a GPU type or a known incident    [SAFERUN_PROFILE]
  --set KEY=VALUE       any profile key, such as retry.attempts=1      [SAFERUN_SET]
  --retries N           attempts after the first; 0 is none            [SAFERUN_RETRIES]
  --run-dir DIR         where runs keep their journal                  [SAFERUN_RUN_DIR]
  --dry-run             show what would run, start nothing             [SAFERUN_DRY_RUN]

SAFERUN_DISABLE=1 runs torchrun untouched, whatever else is set.

Commands:
  run         launch, spelled out (for a script that is named like a command)
  plan        show what would run: command, variables with their reasons, hooks, retries
  gen-shell   write the run as one script that needs no saferun, for bash or for Slurm
  env         print `export` lines for eval
  profiles    list, show, check profiles; print their JSON Schema
  diagnose    explain a failure from its log
  doctor      check the machine and its GPUs before a job does
  runs        watch, list, show, report and clean runs; the mitigations that helped
  help        explain a kind of failure, a variable, a mitigation, a hook or a profile key
"""


def front(argv: Sequence[str]) -> int:
    """Print the version, the help, or what a shell asks for to complete a line.

    Without arguments the help goes to stderr, as for an error.
    """
    if not argv and (asked := os.environ.get("_SAFERUN_COMPLETE")):
        from saferun.cli.completion import answer

        return answer(asked)
    if argv and argv[0] == "--version":
        sys.stdout.write(f"saferun {__version__}\n")
        return 0
    (sys.stdout if argv else sys.stderr).write(HELP)
    return 0 if argv else EXIT_USAGE
