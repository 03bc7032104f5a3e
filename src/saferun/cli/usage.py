"""What `saferun --help` says; `saferun help WORD` explains its words from it."""

from __future__ import annotations

HELP = """\
Usage: saferun [SAFERUN OPTIONS | TORCHRUN OPTIONS]... SCRIPT [ARGS]...
       saferun COMMAND ...

Type saferun where you type torchrun: every option of torchrun means here what it means
there (torchrun --help lists them).

Saferun's own options, before SCRIPT:
  --profile NAME|FILE   settings for a GPU type or a known incident    [SAFERUN_PROFILE]
  --set KEY=VALUE       any profile key, such as retry.attempts=1      [SAFERUN_SET]
  --retries N           attempts after the first; 0 is none            [SAFERUN_RETRIES]
  --run-dir DIR         where runs keep their journal                  [SAFERUN_RUN_DIR]
  --dry-run             show what would run, start nothing             [SAFERUN_DRY_RUN]

SAFERUN_DISABLE=1 runs torchrun untouched, whatever else is set.
SAFERUN_VERDICT_FILE=FILE gets the verdict on a run that fails, as one word.

Commands:
  run         launch, spelled out (for a script that is named like a command)
  plan        show what would run: command, variables with their reasons, hooks, retries
  gen-shell   write the run as one script that needs no saferun, for bash or for Slurm
  adopt       put saferun where scripts start torchrun: shows the difference, -w writes it
  env         print `export` lines for eval
  profiles    list, show, check profiles; print their JSON Schema
  diagnose    explain a failure from its log
  doctor      check the machine and its GPUs before a job does
  runs        watch, list, show, report and clean runs; the mitigations that helped
  help        explain a word: a kind of failure, a variable, a hook, a profile key, ...
"""
