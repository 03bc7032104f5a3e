"""Errors that a person can fix, and their exit codes.

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
