"""The options of the installed torch's torchrun, read once for each interpreter and version.

The table is cached in a file that only the user can write, since it decides how a command line is
read.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping

from saferun.model import Option
from saferun.planning.torchrun.torchrun_install import Launcher
from saferun.system import paths

OPTION_TABLE_TIMEOUT_S = 20.0  # `torchrun --help` takes 1.7 s warm, and 10 s from a cold disk


def option_table(
    launcher: Launcher,
    version: str | None,
    cache_dir: str | None,
    environ: Mapping[str, str] | None = None,
) -> tuple[Option, ...] | None:
    """Return torchrun's options of the installed torch, read in a subprocess of its interpreter.

    Args:
        launcher: the torchrun whose torch is used.
        version: that torch's version. The table is cached by interpreter and version, and not
            cached if this is None.
        cache_dir: the cache's folder; None or an unusable folder: nothing is cached.
        environ: the subprocess's environment, by default that of this process. SAFERUN_INJECT is
            removed from it, and so are PET_ variables, which can make building the parser fail.

    Returns:
        The table for `torchrun_args.parse`; None if the subprocess gives none within 20 s.
    """
    if launcher.interpreter is None:
        return None
    path = _cache_path(launcher.interpreter, version, cache_dir)
    kept = paths.read_private(path) if path else None
    table = _table(kept) if kept else None
    if table is None:
        text = _dump_options(launcher, os.environ if environ is None else environ)
        table = _table(text)
        if table is not None and path is not None:
            paths.write_private(path, text.encode())
    return table


# --- the subprocess

# Run by the launcher's Python, of any version that torch supports. `python -c` adds an entry to
# sys.path that torchrun does not have. What other modules print on import goes to stderr.
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


def _dump_options(launcher: Launcher, environ: Mapping[str, str]) -> str:
    """Return the JSON that the launcher's Python prints, "" if it fails or takes too long."""
    assert launcher.interpreter is not None
    flags = ["-" + launcher.flags] if launcher.flags else []
    clean = {
        name: value
        for name, value in environ.items()
        if name != "SAFERUN_INJECT" and not name.startswith("PET_")
    }
    try:
        process = subprocess.Popen(  # noqa: S603 (the Python that torchrun would start)
            [launcher.interpreter, *flags, "-c", _DUMP],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=clean,
            start_new_session=True,  # so that killing its group also ends what it started
        )
    except OSError:
        return ""
    try:
        out, _ = process.communicate(timeout=OPTION_TABLE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return ""
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()
    _, mark, text = out.decode("utf-8", "replace").rpartition(_MARK)
    return text.strip() if mark and process.returncode == 0 else ""


def _table(text: str | bytes) -> tuple[Option, ...] | None:
    """Return the table in a JSON text, None if it is not one."""
    try:
        rows = json.loads(text)
        table = tuple(Option(dest, tuple(strings), flag, env) for dest, strings, flag, env in rows)
        are_options = all(string.startswith("-") for one in table for string in one.strings)
    except (ValueError, TypeError, AttributeError):
        return None
    return table if table and are_options else None


# --- the cache


def _cache_path(interpreter: str, version: str | None, cache_dir: str | None) -> str | None:
    """Return the cache file of this interpreter and version; None if the cache cannot be used.

    The folder must be the user's own and nobody else's to write: the table decides how a command
    line is read.
    """
    if version is None or cache_dir is None or not paths.private_dir(cache_dir):
        return None
    import hashlib  # OpenSSL takes 4 ms, and a torchrun that is known needs no cache

    key = hashlib.sha256(os.fsencode(interpreter) + b"\0" + os.fsencode(version)).hexdigest()
    return os.path.join(cache_dir, f"options-{key[:24]}.json")
