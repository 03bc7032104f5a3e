"""Files that follow no link: read up to a limit, appended to, or written as a whole.

Every rank may load this file: it imports nothing but os.
"""

import os

_PIECE_BYTES = 1 << 20
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


def read(path: str, limit: int, start: int = 0, *, follow: bool = False) -> bytes:
    """Return a part of a regular file, anybody's; b"" if it is none or cannot be read.

    Args:
        path: the file's path.
        limit: the most bytes that are read.
        start: offset of the first one.
        follow: the path may be a link, as those in /proc/PID/fd are.
    """
    return _read(path, limit, start, 0 if follow else os.O_NOFOLLOW, None) or b""


def read_private(path: str, limit: int = 4 << 20) -> "bytes | None":
    """Return the content of our own regular file, up to `limit` bytes; None if it is none."""
    return _read(path, limit, 0, os.O_NOFOLLOW, os.geteuid())


def _read(path: str, limit: int, start: int, flags: int, owner: "int | None") -> "bytes | None":
    pieces = []
    try:
        descriptor = os.open(path, _READ | flags)
        try:
            status = os.fstat(descriptor)
            is_regular = status.st_mode & 0o170000 == 0o100000
            if not is_regular or owner not in (None, status.st_uid):
                return None
            while limit > 0 and (piece := os.pread(descriptor, min(limit, _PIECE_BYTES), start)):
                pieces.append(piece)
                limit, start = limit - len(piece), start + len(piece)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return None
    return b"".join(pieces)


def make_directory(path: str) -> None:
    """Create a directory, 0700, but no parent: a deleted run directory stays deleted.

    Raises:
        OSError: it cannot be created.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:  # another process may have created it
        return


def open_to_append(path: str) -> int:
    """Open a file for appending, with mode 0600 if new. Raises OSError on failure."""
    return os.open(path, _WRITE | os.O_APPEND, 0o600)


def append(path: str, content: bytes) -> int:
    """Append to a file in one write, with mode 0600 if new; return the file's size.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor = open_to_append(path)
    try:
        os.write(descriptor, content)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write the whole content; write(2) may write less at a time, as on a nearly full disk."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def replace(
    path: str, content: bytes, mode: int = 0o600, *, directory: "int | None" = None
) -> None:
    """Write a whole file at once: a reader finds the old content or the new.

    Args:
        path: the file's path; a link with this name is replaced.
        content: the whole content.
        mode: the file's permissions, which the umask may narrow.
        directory: descriptor of the directory that a relative path starts from.

    Raises:
        OSError: the file cannot be written; an existing file is unchanged.
    """
    draft = _draft(path, content, mode, directory)
    try:
        os.rename(draft, path, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        _unlink(draft, directory)
        raise


def write_new(path: str, content: bytes) -> None:
    """Create a whole file at once, with mode 0600: a reader finds no file or all of it.

    Raises:
        FileExistsError: the file exists.
        OSError: the file cannot be written.
    """
    draft = _draft(path, content, 0o600, None)
    try:
        try:
            os.link(draft, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(path):
                raise FileExistsError(path) from None
            os.rename(draft, path)
    finally:
        _unlink(draft, None)


def _draft(path: str, content: bytes, mode: int, directory: "int | None") -> str:
    """Write a new file beside the path; return its own."""
    draft = f"{path}.{os.getpid()}.tmp"
    flags = _WRITE | os.O_EXCL
    try:
        descriptor = os.open(draft, flags, mode, dir_fd=directory)
    except FileExistsError:  # planted, or left by a process that was killed and had our pid
        os.unlink(draft, dir_fd=directory)
        descriptor = os.open(draft, flags, mode, dir_fd=directory)
    try:
        try:
            write_all(descriptor, content)
        finally:
            os.close(descriptor)  # a network file system may report errors here
    except OSError:
        _unlink(draft, directory)
        raise
    return draft


def _unlink(path: str, directory: "int | None") -> None:
    try:
        os.unlink(path, dir_fd=directory)
    except OSError:
        pass  # it has its name, or the first error matters
