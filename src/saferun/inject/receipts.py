"""Write this process's receipt files."""

import os

from ..base import files
from . import contract, rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable


def write_bootstrap(text: str, outcome: str) -> None:
    """Write the first or the last line of a rank's receipt, without json. Never raises.

    An error in the contract is reported when the first hook needs the contract.

    Args:
        text: the value of SAFERUN_INJECT.
        outcome: contract.APPLIED at the start, contract.FINISHED at the end.
    """
    try:
        directory, attempt = contract.receipt_location(text)
        if directory:
            append(directory, file_name(attempt, os.getpid()), [_bootstrap_line(outcome)])
    except Exception:
        pass


def _bootstrap_line(outcome: str) -> str:
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    numbers = [rank.variable(name) for name in names]
    rank_, local, size = ["null" if number is None else number for number in numbers]
    path, start = os.environ.get("TORCHELASTIC_ERROR_FILE", ""), os.environ.get(contract.START, "")
    start = "".join(letter for letter in start if letter.isprintable() and letter not in '"\\')
    plain = path.isprintable() and not ('"' in path or "\\" in path)
    return (
        f'{{"v":{contract.VERSION},"at":{now()!r},"pid":{os.getpid()},"rank":{rank_},'
        f'"hook":"{contract.BOOTSTRAP}","outcome":"{outcome}",'
        f'"local_rank":{local},"local_world_size":{size}'
        + (f',"start":"{start}"' if start else "")
        + (f',"{contract.ERROR_FILE}":"{path}"}}' if path and plain else "}")
    )


def file_name(attempt: int, pid: int) -> str:
    """Return the name of a process's receipt file."""
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    plain = "".join(letter for letter in restart if letter.isalnum()) or "0"
    return contract.receipt_name(attempt, plain, rank.number(), pid)


def now() -> float:
    """Return the present time in Unix seconds."""
    import time

    return time.time()


def append(directory: str, name: str, lines: "Iterable[str]") -> None:
    """Append lines to a file of the directory in one write. Raises OSError on failure.

    Args:
        directory: the directory, created with mode 0700 if it is missing.
        name: the file's name; it is created with mode 0600, and a link in its place is not
            followed.
        lines: the lines without newlines.
    """
    files.make_directory(directory)
    text = "".join(line + "\n" for line in lines)
    files.append(os.path.join(directory, name), text.encode("utf-8", "backslashreplace"))
