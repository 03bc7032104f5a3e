"""saferun's own lines and error messages on stderr, and its end after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from saferun.errors import EXIT_SOFTWARE, OWN_FAULT, SaferunError
from saferun.system.printable import printable


def say(text: str) -> None:
    """Write `saferun:` lines to stderr; a closed stderr does not stop a job."""
    try:
        plain = printable(text, kept="\n\t")
        lines = [f"saferun: {line}" if line else "" for line in plain.splitlines()]
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return


def settle() -> None:
    """Flush our output; a failed write is dropped and does not change the exit status to 120.

    A write fails, for example, on a terminal that has hung up.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            if stream is not None:  # None if the caller closed it
                stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def die_of_interrupt() -> int:
    """End by the signal itself, as Python does after Ctrl-C: otherwise a shell's loop continues."""
    settle()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    return 130  # the signal is blocked


def report(error: Exception) -> int:
    """Write an error (a line for a user's mistake, a traceback for a bug); return the exit code."""
    if isinstance(error, SaferunError):
        say(str(error).replace("\n", " "))
        return error.code

    import traceback  # only a bug needs it

    trace = "".join(traceback.format_exception(error))
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(printable(trace, kept="\n\t"))
    say(
        f"this is {OWN_FAULT}; SAFERUN_DISABLE=1 runs torchrun without it. "
        "Please report it with the lines above."
    )
    return EXIT_SOFTWARE
