"""Write this process's receipt files, and other files beside them."""

import os

from . import contract, rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


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
    make_directory(directory)
    text = "".join(line + "\n" for line in lines)
    append_bytes(os.path.join(directory, name), text.encode("utf-8", "backslashreplace"))


def open_to_append(path: str) -> int:
    """Open a file for appending, with mode 0600 if new. Raises OSError on failure."""
    return os.open(path, _FLAGS | os.O_APPEND, 0o600)


def append_bytes(path: str, content: bytes) -> int:
    """Append to a file, with mode 0600 if new; return its size. Raises OSError on failure."""
    file = open_to_append(path)
    try:
        os.write(file, content)
        return os.fstat(file).st_size
    finally:
        os.close(file)


def write_new(path: str, content: bytes) -> None:
    """Create a file with its whole content at once: a reader finds no file or all of it.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written.
    """
    draft = f"{path}.{os.getpid()}"
    file = os.open(draft, _FLAGS | os.O_EXCL, 0o600)
    try:
        try:
            while content:
                content = content[os.write(file, content) :]
        finally:
            os.close(file)
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            os.rename(draft, path)
    finally:
        try:
            os.unlink(draft)
        except OSError:
            pass


def make_directory(path: str) -> None:
    """Create a directory, 0700, but no parent: a deleted run directory stays deleted."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another rank may have created it
        return
