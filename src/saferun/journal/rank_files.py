"""The ranks' files in the journal, masked: exceptions, receipts, requests and finished trials.

A rank knows only its own secrets, so it writes without masking. At the attempt's end, before any
use of the files, they are masked in place: as whole texts, since a single line does not show that
the lines above it named a password.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

from saferun.base import files
from saferun.diagnosis.evidence import RankFailure, rank_failure
from saferun.inject import contract

_NAME = re.compile(r"a(\d{1,9})-r(\d{1,9})-rank(\d{1,9}|none)-pid(\d{1,9})(\.[a-z.]+)", re.ASCII)
RECEIPTS, ERRORS = ".jsonl", ".error.json"  # suffixes of names
MAX_BYTES = 1 << 20  # limit for each file; longer ones are cut
_ERROR_FILES = 256  # most files that are read: enough for the earliest exceptions of a large job
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RankFile(NamedTuple):
    """A file of one process."""

    name: str
    restart: int  # torchrun's own restarts within the attempt
    rank: int | None  # None: not a rank of a group
    pid: int


def of_attempt(directory: str | None, attempt: int, *endings: str) -> list[RankFile]:
    """Return the files that the processes of an attempt left.

    Args:
        directory: the directory of the receipts; None if there is none.
        attempt: the number of the attempt.
        endings: suffixes of the wanted names.
    """
    try:
        names = os.listdir(directory) if directory else []
    except OSError:
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name)) and match[5] in endings]
    return [
        RankFile(one[0], int(one[2]), int(one[3]) if one[3].isdigit() else None, int(one[4]))
        for one in found
        if int(one[1]) == attempt
    ]


def of_last_restart(directory: str | None, attempt: int, *endings: str) -> list[RankFile]:
    """Return those of `of_attempt` that are of torchrun's last restart."""
    left = of_attempt(directory, attempt, *endings)
    newest = max((file.restart for file in left), default=0)
    return [file for file in left if file.restart == newest]


def mask(directory: str | None, attempt: int, masked: Callable[[str], str]) -> None:
    """Mask the files of an attempt's ranks; a file that cannot be masked is removed.

    Args:
        directory: the directory of the receipts; None if there is none.
        attempt: the number of the attempt.
        masked: function that returns a text without secrets.
    """
    for file in of_attempt(directory, attempt, RECEIPTS, ERRORS, contract.RECYCLE):
        path = os.path.join(directory or "", file.name)
        try:
            _mask(path, masked, 0, MAX_BYTES)
        except (OSError, ValueError, RecursionError):
            _remove(path)


def mask_trials(state: str | None, masked: Callable[[str], str], start: int) -> int:
    """Mask the finished trials that an attempt has added; return where the next ones begin.

    Args:
        state: the directory that the run's processes share; None if there is none.
        masked: function that returns a text without secrets.
        start: offset in bytes up to which the file is masked.
    """
    from saferun.journal import trials  # imports the journal's events, which `plan` does not need

    path = os.path.join(state or "", trials.FILE)
    if state is None or not os.path.lexists(path):
        return start
    try:
        return _mask(path, masked, start, trials.MAX_BYTES)
    except (OSError, ValueError, RecursionError):
        _remove(path)
        return 0


def failures(directory: str | None, attempt: int) -> tuple[RankFailure, ...]:
    """Read the exceptions that ranks wrote to error files, only those of their last restart.

    Args:
        directory: the directory of the error files; None if there is none.
        attempt: the number of the attempt whose files are read.
    """
    last = of_last_restart(directory, attempt, ERRORS)
    last.sort(key=lambda file: (file.rank is None, file.rank, file.name))
    found = []
    for file in last[:_ERROR_FILES]:
        content = files.read_private(os.path.join(directory or "", file.name), MAX_BYTES)
        text = None if content is None else content.decode("utf-8", "replace")
        found.append(rank_failure(file.rank, text))
    return tuple(found)


def _mask(path: str, masked: Callable[[str], str], start: int, most: int) -> int:
    """Rewrite a file in place, which works on a full disk: masked text is not longer.

    Returns:
        The file's size.

    Raises:
        OSError: the file cannot be opened or written.
        ValueError: the file is not ours, or not a regular file.
    """
    descriptor = os.open(path, _FLAGS)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError(path)
        before = os.pread(descriptor, most, start)
        after = _clean(before, masked)
        end = start + len(after)
        if after != before or status.st_size > end:
            end = start + os.pwrite(descriptor, after, start)
            os.ftruncate(descriptor, end)
        return end
    finally:
        os.close(descriptor)


def _clean(content: bytes, masked: Callable[[str], str]) -> bytes:
    """Return JSON lines with every text in them masked; any other line is masked as a text."""
    lines = content.split(b"\n")
    trees = list(map(_tree, lines))
    if all(isinstance(tree, bytes) for tree in trees):
        return bytes(_walk(content, masked))
    texts: list[str] = []

    def collected(text: str) -> str:
        texts.append(text)
        return text

    _walk(trees, collected)
    whole = "\n".join(texts)
    if masked(whole) == whole:  # nearly always true, and 20 times as fast as masking each text
        return content
    return b"\n".join(_line(*one, masked) for one in zip(lines, trees, strict=True))


def _tree(line: bytes) -> Any:
    """Return the JSON value of a line; the line itself if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return line


def _line(line: bytes, tree: Any, masked: Callable[[str], str]) -> bytes:
    clean = _walk(tree, masked)
    if clean == tree:
        return line
    return clean if isinstance(clean, bytes) else json.dumps(clean).encode()


def _walk(tree: Any, masked: Callable[[str], str]) -> Any:
    if isinstance(tree, str):
        return masked(tree)
    if isinstance(tree, bytes):
        return masked(tree.decode("utf-8", "replace")).encode()
    if isinstance(tree, list):
        return [_walk(item, masked) for item in tree]
    if isinstance(tree, dict):
        return {masked(key): _walk(value, masked) for key, value in tree.items()}
    return tree


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return  # the file is gone, or not ours
