"""Which variables the job's own code names; needed only if a setting seems to have no reader.

A script may read a variable that looks like torch's; a module beside it does so more often. The
text is searched; nothing is run or imported. The search is short, because a launch waits for it and
working directories can hold millions of files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from typing import NamedTuple

from saferun.model import Request

SECONDS = 0.15  # longest duration of a search
MOST_BYTES = 1 << 20  # most that is read of one file
INSTALLED = ("site-packages", "dist-packages", "node_modules", "__pycache__")


class Search(NamedTuple):
    """What a search of the job's code has found."""

    names: frozenset[str]  # those of the wanted names that the code contains
    complete: bool  # whether all of the code was searched


def script_text(request: Request, cwd: str) -> str:
    """Return the script's text; "" for a module, or if it cannot be read as a file."""
    script, options = request.line.script, request.options
    if script is None or options.module:
        return ""
    return script if options.code else _read(os.path.join(cwd, script))


def search(names: Collection[str], request: Request, cwd: str) -> Search:
    """Search the job's code for names of variables, for `SECONDS` at most.

    The code is the script, and the Python files below its directory and below the working
    directory.

    Args:
        names: names of variables.
        request: the user's command line.
        cwd: the directory in which the job starts.

    Returns:
        The names that were found. A search that ended early because it found all names is complete,
        too.
    """
    home = _home(request, cwd)
    if not home:
        return Search(frozenset(), False)
    left, until = set(names), time.monotonic() + SECONDS
    for path in _python_files([*home, cwd], until):
        if path is None or not left:
            break
        text = _read(path)
        left = {name for name in left if name not in text}
    else:
        return Search(frozenset(names) - left, True)
    return Search(frozenset(names) - left, not left)


def _home(request: Request, cwd: str) -> list[str]:
    """Return the script and its directory, or a module's; [] if they are not below `cwd`."""
    script, options = request.line.script, request.options
    if script is None or options.code:
        return []
    if options.module:
        top = os.path.join(cwd, script.partition(".")[0])
        return [found for found in (top, f"{top}.py") if os.path.exists(found)]
    path = os.path.join(cwd, script)
    return [path, os.path.dirname(path)] if os.path.isfile(path) else []


def _python_files(places: list[str], until: float) -> Iterator[str | None]:
    """Yield each Python file at or below some paths once; yield None and stop when time is up."""
    todo, seen = list(reversed(places)), set[str]()
    while todo:
        place = todo.pop()
        if os.path.isfile(place):
            yield place
            continue
        folder = os.path.realpath(place)  # symbolic links may form a cycle
        for entry in () if folder in seen else _entries(folder):
            if time.monotonic() > until:
                yield None
                return
            if entry.name.endswith(".py") or _is_package_folder(entry):
                todo.append(entry.path)
        seen.add(folder)


def _entries(folder: str) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError:  # a file, or a folder that we may not read
        return


def _is_package_folder(entry: os.DirEntry[str]) -> bool:
    if entry.name.startswith(".") or entry.name in INSTALLED:
        return False
    try:
        return entry.is_dir() and not os.path.exists(os.path.join(entry.path, "pyvenv.cfg"))
    except OSError:
        return False


def _read(path: str) -> str:
    try:
        if not os.path.isfile(path):  # reading a pipe would empty it, or never end
            return ""
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(MOST_BYTES)
    except (OSError, ValueError):
        return ""
