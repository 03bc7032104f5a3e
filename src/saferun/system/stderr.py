"""saferun's own lines on stderr, its error messages, and its end after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from saferun.errors import EXIT_SOFTWARE, SaferunError
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


def settle() -> None:
    """Flush our output; what nobody takes is dropped, and does not change the exit status to 120.

    Such is a terminal that has hung up.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:  # closed by the caller
                stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def die_of_interrupt() -> int:
    """End as Python does after Ctrl-C, by the signal itself: a shell's loop goes on otherwise."""
    settle()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    return 130  # it is blocked


def report(error: Exception) -> int:
    """Write an error: one line for a user's mistake, a traceback for ours. Return the exit code."""
    if isinstance(error, SaferunError):
        say(str(error).replace("\n", " "))
        return error.code

    import traceback  # only a fault of ours needs it

    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(printable(trace, kept="\n\t"))
    say(
        "this is a fault of saferun's own; SAFERUN_DISABLE=1 runs torchrun without it. "
        "Please report it with the lines above."
    )
    return EXIT_SOFTWARE
