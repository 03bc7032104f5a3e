"""The program that a generated script runs first: it unpacks the bundle and prints its directory.

    python3 -I -c CODE SCRIPT PID

SCRIPT is the script's file and PID its process, whose original environment is stored: bash changes
SHLVL and others. The directory is private, and lies where only its user and root can replace it:
system/trust.py, which is in the bundle, checks that. Directories that earlier runs have left (they
died of SIGKILL, or torchrun replaced them) are removed. This program uses only the standard
library, since it is packed separately.
"""

from __future__ import annotations

import base64
import bz2
import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
import time

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` costs each start of a script 4 ms
    from collections.abc import Callable, Iterator
    from typing import Any

MARK = b"#: "  # begins the packed lines; the first one is this program
PREFIX = "saferun-kit."
_TMP = "/tmp"  # noqa: S108 - mkdtemp makes a private directory in it
OLD_S = 600.0  # a starting run has no lock yet


def main() -> None:
    """Unpack, and print the directory; exit with status 69 on failure."""
    script, pid = sys.argv[1:]
    os.umask(0o077)
    with open(script, "rb") as file:
        lines = [line[len(MARK) :].rstrip() for line in file if line.startswith(MARK)]
    files = _files(bz2.decompress(base64.b85decode(b"".join(lines[1:]))).decode())
    trust: dict[str, Any] = {"__name__": "trust"}
    exec(files["saferun/system/trust.py"], trust)  # noqa: S102 - as this program itself is run
    environ = _environ(pid)
    trouble = (
        "no place for temporary files that is safe from others: "
        "$TMPDIR, $XDG_RUNTIME_DIR, ~/.cache, /tmp"
    )
    for place in _places(trust["gives_way"]):
        try:
            remove_old(place)
            directory = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        except OSError:
            continue
        try:
            _write(directory, files, environ)
            sys.stdout.write(directory)
            sys.stdout.flush()
        except BaseException as error:
            shutil.rmtree(directory, ignore_errors=True)
            if not isinstance(error, OSError) or isinstance(error, BrokenPipeError):
                raise  # Ctrl-C, or the script has ended
            trouble = f"{directory}: {error.strerror}"
        else:
            return
    sys.stderr.write(f"saferun: {trouble}\n")
    raise SystemExit(69)


def _files(packed: str) -> dict[str, str]:
    """Return the texts by path; they alternate."""
    parts = packed.split("\0")
    return dict(zip(parts[::2], parts[1::2]))  # noqa: B905 (3.9 has no `strict`)


def _environ(pid: str) -> bytes:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:  # there is no /proc; or it is gone or a zombie, whose file only root may open
        if os.getppid() != int(pid):
            raise BrokenPipeError from None  # the script has ended
        return b"".join(b"%s=%s\0" % pair for pair in os.environb.items())


def _places(gives_way: Callable[[str], bool]) -> Iterator[str]:
    home = os.environ.get("HOME", "")
    cache = os.path.join(home, ".cache")
    # A colon would split PYTHONPATH, and root must not create directories in a user's HOME that
    # lock the user out.
    own_home = home.startswith("/") and os.path.isdir(home) and os.stat(home).st_uid == os.geteuid()
    given = (os.environ.get("TMPDIR") or _TMP, os.environ.get("XDG_RUNTIME_DIR", ""))
    for place in (*given, *([cache] if own_home else []), _TMP):
        if place == cache and not os.path.isdir(cache):
            try:
                os.mkdir(cache)
            except OSError:
                continue
        if place.startswith("/") and ":" not in place and not gives_way(os.path.realpath(place)):
            yield place


def remove_old(place: str) -> None:
    """Remove this user's old bundles that no run has locked.

    Raises:
        OSError: the directory cannot be read.
    """
    for entry in os.scandir(place):
        if not entry.name.startswith(PREFIX) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            found = entry.stat(follow_symlinks=False)
            if found.st_uid != os.geteuid() or time.time() - found.st_mtime < OLD_S:
                continue
            descriptor = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        with contextlib.suppress(OSError):  # a run holds it
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        os.close(descriptor)


def _write(directory: str, files: dict[str, str], environ: bytes) -> None:
    for name, text in files.items():
        path = os.path.join(directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    with open(os.path.join(directory, "environ"), "wb") as file:
        file.write(environ)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):  # the script has ended
        os._exit(1)
