"""The places of saferun's own files, and private directories for them.

An unusable directory raises nothing here: these files are optional, and a full disk or a read-only
home never stops a job. This module also finds programs on PATH.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping

from saferun.base import files

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the package's own directory


def config_dir(environ: Mapping[str, str]) -> str:
    """Return the user's directory of saferun settings; it may not exist."""
    return os.path.join(_base(environ, "XDG_CONFIG_HOME", ".config")[0], "saferun")


def cache_dir(environ: Mapping[str, str]) -> str:
    """Return the directory of files that can be computed again; it may not exist."""
    return _written(environ, "XDG_CACHE_HOME", ".cache")


def state_dir(environ: Mapping[str, str]) -> str:
    """Return the directory of records of runs; it may not exist."""
    return _written(environ, "XDG_STATE_HOME", ".local/state")


def runs_dir(run_dir: str | None, environ: Mapping[str, str], cwd: str) -> str:
    """Return the directory of all runs; it may not exist.

    Args:
        run_dir: the value of `--run-dir`; None if it was not given.
        environ: the environment, for SAFERUN_RUN_DIR and the default below the state directory.
        cwd: the directory that a relative path starts from.
    """
    given = run_dir or environ.get("SAFERUN_RUN_DIR")
    return os.path.join(cwd, given or os.path.join(state_dir(environ), "runs"))


def foreign_home(environ: Mapping[str, str]) -> str:
    """Return a sentence if saferun writes nothing to HOME because it is not ours; else ""."""
    for variable, default in (("XDG_STATE_HOME", ".local/state"), ("XDG_CACHE_HOME", ".cache")):
        base, named = _base(environ, variable, default)
        if problem := _foreign(base, named):
            return f"{problem}: saferun keeps its own files in {_temporary(environ)}"
    return ""


def _written(environ: Mapping[str, str], variable: str, default: str) -> str:
    base, named = _base(environ, variable, default)
    return os.path.join(_temporary(environ) if _foreign(base, named) else base, "saferun")


def _base(environ: Mapping[str, str], variable: str, default: str) -> tuple[str, str]:
    """Return a directory, and the place that decides its owner: HOME, or "" for the directory."""
    base = environ.get(variable, "")
    if os.path.isabs(base):  # the XDG rule: relative paths are ignored
        return base, ""
    home = environ.get("HOME") or os.path.expanduser("~")
    return os.path.join(home, default), home


def _foreign(base: str, home: str) -> str:
    """Return why nothing should be written below a directory: `su` and `sudo -E` keep HOME.

    Directories that we create there would belong to root and be private, which would lock the user
    out. The same holds for a directory below our own HOME that is another user's, or a link to one.
    """
    place = base
    while not os.path.lexists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    mine = {os.geteuid()}
    return (home and _not_of(home, mine)) or _not_of(place, mine | {0})


def _not_of(place: str, users: set[int]) -> str:
    try:
        owner = os.stat(place).st_uid
    except OSError:
        return f"{place} does not exist"
    return "" if owner in users else f"{place} belongs to user {owner}, not to us"


def _temporary(environ: Mapping[str, str]) -> str:
    own = environ.get("TMPDIR", "")
    try:
        usable = os.path.isabs(own) and os.stat(own).st_uid in (0, os.geteuid())
    except OSError:
        usable = False
    return os.path.join(own if usable else "/tmp", _name())  # noqa: S108 - see `_check_temporary`


def _name() -> str:
    return f"saferun-{os.geteuid()}"


def shipped(name: str) -> str:
    """Return a directory that we ship: in the wheel, or beside src in a checkout."""
    packed = os.path.join(PACKAGE, "data", name)
    return packed if os.path.isdir(packed) else os.path.join(PACKAGE, "..", "..", name)


def absolute(path: str) -> str:
    """Return an absolute path; a relative one unchanged if the working directory was deleted."""
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        return path


def on_path(name: str, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the executable files of this name on PATH, in its order."""
    for entry in environ.get("PATH", os.defpath).split(os.pathsep):
        path = os.path.join(absolute(entry), name)
        if os.path.isfile(path) and os.access(path, os.X_OK):
            yield path


def private_dir(path: str) -> bool:
    """Create a directory 0700 (parents too); return whether only this user can write to it."""
    try:
        make(path)
    except OSError:
        return False
    return is_private(path)


def is_private(path: str) -> bool:
    """Return whether a directory (not a link to one) is ours and nobody else can write to it."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return (status.st_mode & 0o170022) == 0o040000 and status.st_uid == os.geteuid()


def make(path: str) -> None:
    """Create a directory 0700, and its missing parents with modes for their purpose.

    ~/.cache and similar directories also contain other files, so the umask determines who may enter
    them; a directory named `saferun` is private.

    Raises:
        OSError: the directory cannot be created, or another user has replaced a parent of it.
    """
    _check_temporary(path)
    _make(path, 0o700)


def _make(path: str, mode: int) -> None:
    parent = os.path.dirname(path)
    if parent not in ("", path) and not os.path.isdir(parent):
        _make(parent, 0o700 if os.path.basename(parent) == "saferun" else 0o755)
    with contextlib.suppress(FileExistsError):  # another process may have created it
        os.mkdir(path, mode)


def _check_temporary(path: str) -> None:
    """Create our directory in a shared one, or check that it is ours and private."""
    above, ours, _ = path.partition(f"/{_name()}/")
    if not ours:
        return
    place = above + ours.rstrip("/")
    with contextlib.suppress(FileExistsError):
        os.mkdir(place, 0o700)
    status = os.lstat(place)
    if (status.st_mode & 0o170077) != 0o040000 or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is not a private directory of ours", place)


def remove_dir(path: str, empty: Callable[[int], None]) -> None:
    """Remove a directory, whatever replaces its name in the meantime.

    Args:
        path: the directory's path; a link is refused.
        empty: function that removes its content, by an open descriptor.

    Raises:
        OSError: the directory, or a part of it, cannot be removed, or `empty` refuses it.
    """
    above, name = os.path.split(path)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    parent = os.open(above, flags)
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
        try:
            empty(descriptor)
        finally:
            os.close(descriptor)
        os.rmdir(name, dir_fd=parent)
    finally:
        os.close(parent)


def write_private(path: str, content: bytes) -> bool:
    """Write a file 0600 atomically; return whether that succeeded."""
    if not private_dir(os.path.dirname(path)):
        return False
    try:
        files.replace(path, content)
    except OSError:
        return False
    return True
