"""saferun's commands called in this process: a fresh interpreter for each would cost 0.3 s.

What only a process can show (descriptors, signals, a launch) is tested with real processes.
"""

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from saferun.__main__ import main


class Ended(NamedTuple):
    """A command that has ended; the names are those of subprocess.CompletedProcess."""

    returncode: int
    stdout: str
    stderr: str


def call(*argv: str, environ: Mapping[str, str], cwd: Path) -> Ended:
    """Run `saferun ARGV` with this environment, and no other variable, in a directory."""
    assert argv
    assert not argv[0].startswith("-"), "a launch would replace this process"
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environ, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        before = Path.cwd()
        os.chdir(cwd)  # contextlib.chdir is of Python 3.11
        try:
            status = main(list(argv))
        finally:
            os.chdir(before)
    return Ended(status, out.getvalue(), err.getvalue())
