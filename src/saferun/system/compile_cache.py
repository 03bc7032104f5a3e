"""The directory in which torch.compile stores compiled code.

Source: torch/_inductor/runtime/cache_dir_utils.py (`default_cache_dir`), torch 2.4 to 2.15.
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import pwd
from collections.abc import Mapping

_ENTRIES = 10_000  # most entries that are examined


def directory(environ: Mapping[str, str]) -> str:
    """Return the directory for a job."""
    temporary = next((environ[n] for n in ("TMPDIR", "TEMP", "TMP") if environ.get(n)), "/tmp")  # noqa: S108 - only looked at
    beside = os.path.join(temporary, f"torchinductor_{_user(environ)}")
    return environ.get("TORCHINDUCTOR_CACHE_DIR") or beside


def _user(environ: Mapping[str, str]) -> str:
    """Return the user's name, as from getpass.getuser."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        if environ.get(name):
            return environ[name]

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"uid_{os.getuid()}"


def has_older(environ: Mapping[str, str], at_s: float) -> bool:
    """Return whether the cache has graphs that were compiled before a time.

    Args:
        environ: the job's environment.
        at_s: seconds since the epoch.
    """
    graphs = os.path.join(glob.escape(directory(environ)), "fxgraph", "*", "*")
    return any(_changed_at(path) < at_s for path in itertools.islice(glob.iglob(graphs), _ENTRIES))


def _changed_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:  # the file has gone
        return float("inf")
