"""saferun's own lines on stderr, and its error messages."""

from __future__ import annotations

import sys

from saferun.system.printable import printable


def say(text: str) -> None:
    """Write `saferun:` lines to stderr; a closed stderr stops no job."""
    try:
        plain = printable(text, kept="\n\t")
        lines = [f"saferun: {line}" if line else "" for line in plain.splitlines()]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return


def report(error: Exception) -> int:
    """Write an error: one line for a user's mistake, a traceback for ours. Return the exit code."""
    from saferun.errors import EXIT_SOFTWARE, SaferunError

    if isinstance(error, SaferunError):
        say(str(error).replace("\n", " "))
        return error.code
    import traceback

    trace = "".join(traceback.format_exception(error))
    try:  # noqa: SIM105 - contextlib is not worth its import on the launch path
        sys.stderr.write(printable(trace, kept="\n\t"))
    except (AttributeError, OSError, ValueError):
        pass
    say(
        "this is a fault of saferun's own; SAFERUN_DISABLE=1 runs torchrun without it. "
        "Please report it with the lines above."
    )
    return EXIT_SOFTWARE
