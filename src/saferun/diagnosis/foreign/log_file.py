"""A log in a file or on standard input, read in bounded memory."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO

from saferun.diagnosis.foreign import long_log
from saferun.diagnosis.reading.log_lines import Log
from saferun.errors import EXIT_UNAVAILABLE, SaferunError

_CHUNK_BYTES = 4 * 1024 * 1024
_UTF16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class LogError(SaferunError):
    """The log cannot be read (exit 69)."""

    code = EXIT_UNAVAILABLE


class LogNotFoundError(LogError, FileNotFoundError):
    """The file does not exist. Python programs may also catch this as FileNotFoundError."""

    __str__ = SaferunError.__str__


def read(path: str | None) -> Log:
    """Read a log of any size in bounded memory.

    Args:
        path: a file, or "-" or None for standard input.

    Raises:
        LogError: the file is missing or not readable.
    """
    if path is None or path == "-":
        return long_log.read(_chunks(sys.stdin.buffer))
    try:
        with open(path, "rb", buffering=0) as file:
            return long_log.read(_chunks(file))
    except OSError as error:
        what = f"the log cannot be read: {os.strerror(error.errno or 0)}"
        kind = LogNotFoundError if isinstance(error, FileNotFoundError) else LogError
        raise kind(what, where=path, fix="name a text file, or - for standard input") from None


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    """Yield a stream's bytes; UTF-16 from a Windows shell's redirection becomes UTF-8."""
    first = file.read(_CHUNK_BYTES) or b""
    encoding = _UTF16.get(first[:2])
    if encoding is None:
        yield first
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
    yield decoder.decode(first[2:]).encode()
    while chunk := file.read(_CHUNK_BYTES):
        yield decoder.decode(chunk).encode()
