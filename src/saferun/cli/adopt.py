"""`saferun adopt`: replace torchrun by saferun in scripts."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Iterator

import click

from saferun.cli.colour import echo_page
from saferun.cli.options import HELP, echo
from saferun.errors import EXIT_USAGE
from saferun.export.adopt import Adoption, adopt

_STYLES = {r"^\+.*": "green", r"^-.*": "red", r"^@@.*": "cyan"}


@click.command(context_settings=HELP)
@click.option("-w", "write", is_flag=True, help="Write the files; else nothing is changed.")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
def command(files: tuple[str, ...], write: bool) -> int:
    """Put saferun where a script starts torchrun, and show the difference.

    torchrun, `python -m torch.distributed.run` and `.launch` become saferun. Places that start
    ranks in another way are named on stderr, with what to write there.
    """
    failed = False
    for path in files:
        try:
            _adopt(path, write)
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            echo(f"saferun: {path} cannot be changed: {reason}", err=True)
            failed = True
    return EXIT_USAGE if failed else 0


def _adopt(path: str, write: bool) -> None:
    """Show the difference in one file, and write it if asked to.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it is not a text file.
    """
    if not os.path.isfile(path):  # reading a pipe would empty it
        os.stat(path)
        raise ValueError("it is not a regular file")
    with open(path, "rb") as file:
        content = file.read()
    if b"\0" in content:
        raise ValueError("it is not a text file")
    old = content.decode("utf-8", "surrogateescape")
    found = adopt(old, os.path.basename(path))
    if found.text != old:
        echo_page("".join(_difference(path, old, found.text)).rstrip("\n"), _STYLES)
        if write:
            _write(path, found.text.encode("utf-8", "surrogateescape"))
    _report(path, old, found)


def _difference(path: str, old: str, new: str) -> Iterator[str]:
    lines = (old.splitlines(keepends=True), new.splitlines(keepends=True))
    for line in difflib.unified_diff(*lines, path, path):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _report(path: str, old: str, found: Adoption) -> None:
    for line, remark in found.remarks:
        echo(f"saferun: {path}:{line} is left as it is: {remark}", err=True)
    if found.text == old and not found.remarks:
        echo(f"saferun: {path} starts no torchrun: nothing to change", err=True)


def _write(path: str, content: bytes) -> None:
    """Replace a file's content atomically; a symbolic link, the owner and the mode stay.

    Raises:
        OSError: it is read-only, or its directory is.
    """
    real = os.path.realpath(path)
    if not os.access(real, os.W_OK):
        raise PermissionError(0, "it is read-only")
    before = os.stat(real)
    draft, name = tempfile.mkstemp(prefix=".saferun-", dir=os.path.dirname(real))
    try:
        with open(draft, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(draft)
            if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                os.chown(draft, before.st_uid, before.st_gid)
            os.chmod(draft, before.st_mode & 0o7777)
        os.replace(name, real)
    except BaseException:
        os.unlink(name)
        raise
