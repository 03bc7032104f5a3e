"""Where saferun's own files are, and how they are written: private, atomic, following no links.

Nothing here raises for a directory that cannot be used: what we keep is a convenience, and a full
disk or a read-only home never stops a job. Also: which programs PATH finds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the package itself


def config_dir(environ: Mapping[str, str]) -> str:
    """Return the user's directory of saferun settings; it may not exist."""
    return _base(environ, "XDG_CONFIG_HOME", ".config")


def cache_dir(environ: Mapping[str, str]) -> str:
    """Return the directory of what can be computed again; it may not exist."""
    return _base(environ, "XDG_CACHE_HOME", ".cache")


def state_dir(environ: Mapping[str, str]) -> str:
    """Return the directory of records of runs; it may not exist."""
    return _base(environ, "XDG_STATE_HOME", ".local/state")


def runs_dir(run_dir: str | None, environ: Mapping[str, str], cwd: str) -> str:
    """Return the directory of all runs; it may not exist.

    Args:
        run_dir: the value of `--run-dir`; None where it was not given.
        environ: for SAFERUN_RUN_DIR, and for the default below the state directory.
        cwd: where a relative path starts.
    """
    given = run_dir or environ.get("SAFERUN_RUN_DIR")
    return os.path.join(cwd, given or os.path.join(state_dir(environ), "runs"))


def _base(environ: Mapping[str, str], variable: str, default: str) -> str:
    base = environ.get(variable, "")
    if not os.path.isabs(base):  # the XDG rule: a relative path is ignored
        base = os.path.join(environ.get("HOME") or os.path.expanduser("~"), default)
    return os.path.join(base, "saferun")


def shipped(name: str) -> str:
    """Return a directory that we ship: in the wheel, or beside src in a checkout."""
    packed = os.path.join(PACKAGE, "data", name)
    return packed if os.path.isdir(packed) else os.path.join(PACKAGE, "..", "..", name)


def on_path(name: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the executable files of this name on PATH, in its order."""
    for entry in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(os.path.abspath(entry), name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            yield path


def private_dir(path: str) -> bool:
    """Make a directory 0700 (parents too); return whether only this user can write to it."""
    try:
        make(path)
        status = os.lstat(path)
    except OSError:
        return False
    return (status.st_mode & 0o170022) == 0o040000 and status.st_uid == os.geteuid()


def make(path: str) -> None:
    """Make a directory and missing parents 0700; os.makedirs gives parents the umask's mode."""
    try:
        _make_one(path)
    except FileNotFoundError:
        parent = os.path.dirname(path)
        if parent in ("", path):
            raise
        make(parent)
        _make_one(path)


def _make_one(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another process may have been faster
        return


def read_private(path: str, limit: int = 4 * 1024 * 1024) -> bytes | None:
    """Return the content of a regular file of ours, up to `limit` bytes; None where it is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if (status.st_mode & 0o170000) != 0o100000 or status.st_uid != os.geteuid():
            return None
        return os.read(descriptor, limit)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def write_private(path: str, content: bytes) -> bool:
    """Write a file 0600 atomically; return whether that worked."""
    if not private_dir(os.path.dirname(path)):
        return False
    temporary = f"{path}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o600)
        try:
            os.write(descriptor, content)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        try:  # noqa: SIM105 (contextlib is not worth its import on the launch path)
            os.unlink(temporary)
        except OSError:
            pass
        return False
    return True
