"""The words of saferun's own that may stand where torchrun has its script.

`saferun --help` loads nothing more; the grammar (planning/torchrun/torchrun_args) has them, too.
"""

COMMANDS = {  # with what each does
    "run": "launch, spelled out (for a script that is named like a command)",
    "plan": "show what would run: command, variables with their reasons, hooks, retries",
    "gen-shell": "write the run as one script that needs no saferun, for bash or for Slurm",
    "adopt": "put saferun where scripts start torchrun: shows the difference, -w writes it",
    "env": "print `export` lines for eval",
    "profiles": "list, show, check profiles; print their JSON Schema",
    "diagnose": "explain a failure from its log",
    "doctor": "check the machine and its GPUs before a job does",
    "runs": "watch, list, show, report and clean runs; the mitigations that helped",
    "help": "explain a word: a kind of failure, a variable, a hook, a profile key, ...",
}
