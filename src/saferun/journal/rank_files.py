"""What ranks wrote for the journal, masked: exceptions, receipts, requests and finished trials.

A rank knows no secrets but its own, so it writes what it has as it is. At the attempt's end, before
anything is concluded from the files, they are masked where they are: whole texts, since a single
line does not show that the lines above it named a password.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from typing import Any, NamedTuple

from saferun.diagnosis.evidence import RankFailure, rank_failure
from saferun.inject import contract
from saferun.system import paths

_NAME = re.compile(r"a(\d{1,9})-r(\d{1,9})-rank(\d{1,9}|none)-pid\d{1,9}(\.[a-z.]+)", re.ASCII)
RECEIPTS, ERRORS = ".jsonl", ".error.json"  # how names end
MAX_BYTES = 1 << 20  # the most of each file; what is longer is cut
_ERROR_FILES = 256  # the most that are read: enough for the earliest exceptions of a large job
_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class RankFile(NamedTuple):
    """A file of one process."""

    name: str
    restart: int  # torchrun's own restarts within the attempt
    rank: int | None  # None: no rank of a group


def of_attempt(directory: str | None, attempt: int, *endings: str) -> list[RankFile]:
    """Return the files that the processes of an attempt have left.

    Args:
        directory: the one of the receipts; None where there is none.
        attempt: the number of the attempt.
        endings: of the names that count.
    """
    try:
        names = os.listdir(directory) if directory else []
    except OSError:
        return []
    found = [match for name in names if (match := _NAME.fullmatch(name)) and match[4] in endings]
    return [
        RankFile(one[0], int(one[2]), int(one[3]) if one[3].isdigit() else None)
        for one in found
        if int(one[1]) == attempt
    ]


def mask(directory: str | None, attempt: int, masked: Callable[[str], str]) -> None:
    """Mask what the ranks of an attempt wrote; a file that cannot be masked is removed.

    Args:
        directory: the one of the receipts; None where there is none.
        attempt: the number of the attempt.
        masked: returns a text without secrets.
    """
    for file in of_attempt(directory, attempt, RECEIPTS, ERRORS, contract.RECYCLE):
        path = os.path.join(directory or "", file.name)
        try:
            _mask(path, masked, 0, MAX_BYTES)
        except (OSError, ValueError, RecursionError):
            _remove(path)


def mask_trials(state: str | None, masked: Callable[[str], str], start: int) -> int:
    """Mask the finished trials that an attempt has added; return where the next one's begin.

    Args:
        state: the directory that the run's processes share; None where there is none.
        masked: returns a text without secrets.
        start: what comes before has been masked, in bytes.
    """
    from saferun.journal import trials  # loads the journal's events, which `plan` does without

    path = os.path.join(state or "", trials.FILE)
    if state is None or not os.path.lexists(path):
        return start
    try:
        return _mask(path, masked, start, trials.MAX_BYTES)
    except (OSError, ValueError, RecursionError):
        _remove(path)
        return 0


def failures(directory: str | None, attempt: int) -> tuple[RankFailure, ...]:
    """Read the exceptions that ranks wrote to error files, those of their last restart only.

    Args:
        directory: the one of the error files; None where there is none.
        attempt: the number of the attempt whose files are read.
    """
    files = of_attempt(directory, attempt, ERRORS)
    newest = max((file.restart for file in files), default=0)
    last = [file for file in files if file.restart == newest]
    last.sort(key=lambda file: (file.rank is None, file.rank, file.name))
    found = []
    for file in last[:_ERROR_FILES]:
        content = paths.read_private(os.path.join(directory or "", file.name), MAX_BYTES)
        text = None if content is None else content.decode("utf-8", "replace")
        found.append(rank_failure(file.rank, text))
    return tuple(found)


def _mask(path: str, masked: Callable[[str], str], start: int, most: int) -> int:
    """Rewrite a file in its place, which a full disk allows: what is masked is no longer.

    Returns:
        Its size.

    Raises:
        OSError: it cannot be opened or written.
        ValueError: it is not ours, or is not a file.
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
    """Return lines of JSON with every text in them masked; what is no JSON is masked as a text."""
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
    if masked(whole) == whole:  # nearly always, and 20 times as fast as text by text
        return content
    return b"\n".join(_line(*one, masked) for one in zip(lines, trees, strict=True))


def _tree(line: bytes) -> Any:
    """Return what a line means; the line itself where it is no JSON."""
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
        return  # it is gone, or not ours
