"""Run a command by its name. Each command has its own file, which is imported when it is called."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from saferun.errors import UnavailableError
from saferun.system.printable import printable


def command_named(name: str) -> click.Command:
    """Return a command; its module is imported here."""
    module = "runs.command" if name == "runs" else name.replace("-", "_")
    command: click.Command = import_module(f"saferun.cli.{module}").command
    return command


def commands(argv: Sequence[str]) -> int:
    """Run one command and return its exit status.

    Raises:
        SaferunError: the caller prints it.
        BrokenPipeError: the reader of the output is gone.
    """
    name = argv[0]
    command = command_named(name)
    try:
        return command.main(argv[1:], prog_name=f"saferun {name}", standalone_mode=False) or 0
    except click.ClickException as error:
        text = io.StringIO()
        error.show(text)
        sys.stderr.write(printable(text.getvalue(), kept="\n"))
        return error.exit_code
    except click.Abort:
        return 130
    except OSError as error:
        if error.filename or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter writes again at exit
        raise UnavailableError(f"the output cannot be written: {error.strerror}") from None
