"""What can go wrong: errors that a person can fix, with their exit codes, and faults of ours.

Each error has three parts: what is wrong, where, and the fix. Exit codes are an interface
(docs/usage.md). The job's own exit code is passed on unchanged.
"""

from __future__ import annotations

import os

EXIT_USAGE = 2
EXIT_UNAVAILABLE = os.EX_UNAVAILABLE  # 69: a preflight or a needed program failed
EXIT_SOFTWARE = os.EX_SOFTWARE  # 70: a bug in saferun
EXIT_BUSY = os.EX_TEMPFAIL  # 75: a lock is held
EXIT_CONFIG = os.EX_CONFIG  # 78: bad profile or configuration


LONGEST = 500  # most characters in `what`, which may quote a file that is one long word


OWN_FAULT = "a fault of saferun's own"  # whoever reads it can do nothing but report it


def own_fault(what: str, error: Exception) -> str:
    """Return the line about a fault of saferun itself.

    Args:
        what: what could not be done.
        error: the exception.

    >>> own_fault("the checkpoints could not be looked at", KeyError("a"))
    "the checkpoints could not be looked at, a fault of saferun's own (KeyError: 'a')"
    """
    detail = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{what}, {OWN_FAULT} ({detail})"


class SaferunError(Exception):
    """An error that a person can fix.

    Args:
        what: what is wrong, in one clause.
        where: the file, option or variable that has the error; may be empty.
        fix: what to do about it; may be empty.
    """

    code = EXIT_CONFIG

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what if len(what) <= LONGEST else f"{what[:LONGEST]}…"
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return "; ".join(part for part in (self.what, self.where, self.fix) if part)


class UsageError(SaferunError):
    """The command line is wrong (exit 2)."""

    code = EXIT_USAGE


class ProfileError(SaferunError):
    """A profile or a setting is wrong (exit 78)."""


class UnavailableError(SaferunError):
    """A program or a library that the launch needs is not there (exit 69)."""

    code = EXIT_UNAVAILABLE


class BusyError(SaferunError):
    """Another run has the GPUs (exit 75)."""

    code = EXIT_BUSY


class FaultError(SaferunError):
    """A part of saferun itself has failed (exit 70)."""

    code = EXIT_SOFTWARE
