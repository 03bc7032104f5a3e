"""saferun's own lines on stderr, and how its errors are told there."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Write `saferun:` lines on stderr; a stderr that is closed or gone stops no job."""
    try:
        lines = [f"saferun: {line}" if line else "" for line in text.splitlines()]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return


def report(error: Exception) -> int:
    """Say what went wrong: one line for a person's mistake, everything for ours."""
    from saferun.errors import EXIT_SOFTWARE, SaferunError

    if isinstance(error, SaferunError):
        say(str(error).replace("\n", " "))
        return error.code
    import traceback

    traceback.print_exception(error)
    say(
        "this is a fault of saferun's own; SAFERUN_DISABLE=1 runs torchrun without it. "
        "Please report it with the lines above."
    )
    return EXIT_SOFTWARE
