"""What `saferun --help` says; `saferun help WORD` has its tables, too."""

from saferun.knowledge.command_names import COMMANDS

# saferun's own options: how each is written, what it does, the variable that stands for it.
OPTIONS = (
    ("--profile NAME|FILE", "settings for a GPU type or a known incident", "SAFERUN_PROFILE"),
    ("--set KEY=VALUE", "any profile key, such as retry.attempts=1", "SAFERUN_SET"),
    ("--retries N", "attempts after the first; 0 is none", "SAFERUN_RETRIES"),
    ("--run-dir DIR", "where runs keep their journal", "SAFERUN_RUN_DIR"),
    ("--dry-run", "show what would run, start nothing", "SAFERUN_DRY_RUN"),
)
DISABLE = "SAFERUN_DISABLE=1 runs torchrun untouched, whatever else is set"
VERDICT_FILE = "SAFERUN_VERDICT_FILE=FILE gets the verdict on a run that fails, as one word"

_OPTIONS = "\n".join(f"  {how:<22}{does:<47}[{variable}]" for how, does, variable in OPTIONS)
_COMMANDS = "\n".join(f"  {name:<12}{does}" for name, does in COMMANDS.items())
HELP = f"""\
Usage: saferun [SAFERUN OPTIONS | TORCHRUN OPTIONS]... SCRIPT [ARGS]...
       saferun COMMAND ...

Type saferun where you type torchrun: every option of torchrun means here what it means
there (torchrun --help lists them).

Saferun's own options, before SCRIPT:
{_OPTIONS}

{DISABLE}.
{VERDICT_FILE}.

Commands:
{_COMMANDS}
"""
