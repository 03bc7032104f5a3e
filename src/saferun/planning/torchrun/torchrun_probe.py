"""The options of the installed torch's torchrun, read once for each interpreter and version.

The table is cached in a file that only the user can write, since it decides how a command line is
read.
"""

from __future__ import annotations

import json
from binascii import crc32
from collections.abc import Mapping
from typing import Any

from saferun.base import untrusted
from saferun.model import Option
from saferun.planning.torchrun.torchrun_install import Launcher
from saferun.system import command, content_cache

OPTION_TABLE_TIMEOUT_S = 20.0  # `torchrun --help` takes 1.7 s warm, and 10 s from a cold disk


def option_table(
    launcher: Launcher, version: str | None, environ: Mapping[str, str]
) -> tuple[Option, ...] | None:
    """Return torchrun's options of the installed torch, read in a subprocess of its interpreter.

    Args:
        launcher: the torchrun whose torch is used.
        version: that torch's version; the table is cached by interpreter and version, but not if
            the version is None.
        environ: the user's variables. The subprocess gets them without SAFERUN_INJECT and without
            PET_ variables, which can make building the parser fail.

    Returns:
        The table for `torchrun_args.parse`; None if the subprocess gives none within 20 s.
    """
    if launcher.interpreter is None:
        return None
    made_of = [launcher.interpreter, version]
    name = f"options-{crc32(json.dumps(made_of).encode()):08x}"
    table = _table(content_cache.read(name, made_of, environ)) if version else None
    if table is None:
        rows = untrusted.value(_asked(launcher.interpreter, launcher.flags, environ))
        table = _table(rows)
        if table and version:
            content_cache.write(name, made_of, rows, environ)
    return table


# The launcher's Python runs this code; it may be any version that torch supports. `python -c` adds
# an entry to sys.path that torchrun does not have. Other modules' output on import goes to stderr.
_MARK = "saferun-options:"
_DUMP = """
import os, sys
if sys.path[:1] == [""]:
    del sys.path[0]
out = os.dup(1)
os.dup2(2, 1)
import json
from torch.distributed.argparse_util import check_env, env
from torch.distributed.run import get_args_parser
options = []
for action in get_args_parser()._actions:
    if action.option_strings:
        if action.nargs not in (None, 0):
            raise SystemExit("an option with nargs=%r" % (action.nargs,))
        reads = "PET_" + action.dest.upper() if isinstance(action, (env, check_env)) else None
        options.append([action.dest, action.option_strings, action.nargs == 0, reads])
os.write(out, ("MARK" + json.dumps(options) + "\\n").encode())
""".replace("MARK", _MARK)


def _asked(interpreter: str, flags: str, environ: Mapping[str, str]) -> str:
    """Return the JSON that the launcher's Python prints; "" if it fails or takes too long."""
    clean = {n: v for n, v in environ.items() if n != "SAFERUN_INJECT" and n[:4] != "PET_"}
    argv = (interpreter, *([f"-{flags}"] if flags else []), "-c", _DUMP)
    answer = command.run(argv, clean, OPTION_TABLE_TIMEOUT_S)
    return "" if answer.trouble else answer.out.rpartition(_MARK)[2].strip()


def _table(rows: Any) -> tuple[Option, ...] | None:
    """Return the table in a JSON value; None if the value is no table."""
    try:
        table = tuple(Option(dest, tuple(strings), flag, env) for dest, strings, flag, env in rows)
        are_options = all(string.startswith("-") for one in table for string in one.strings)
    except (ValueError, TypeError, AttributeError):
        return None
    return table if table and are_options else None
