"""Pure: a bounded list of lines from the bytes of a log of any length.

The log's head, its tail and the places that mention a failure are kept; other lines are only
counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from saferun.diagnosis.reading import log_reader
from saferun.diagnosis.reading.log_lines import Log

HEAD_BYTES = 128 * 1024
TAIL_BYTES = 512 * 1024
BEFORE_BYTES = 6000  # bytes kept before a mention: a traceback
AFTER_BYTES = 3000  # bytes kept after it: a message of several lines
FIRST_BYTES = 256 * 1024  # kept from the first mention on, between head and tail
LAST_BYTES = 512 * 1024  # kept up to the last mention

# Between head and tail, a place without any of these cannot decide anything.
_MENTIONS = (b"rror", b"xception", b"NCCL WARN", b"FAIL", b"signal ", b"atal", b"Xid", b"illed")


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of a log's bytes."""

    offset: int
    number: int  # number of its first line, from 1
    data: bytes

    @property
    def end(self) -> int:
        return self.offset + len(self.data)

    def without(self, count: int) -> _Piece:
        """Return the piece without its first `count` bytes."""
        if count <= 0:
            return self
        number = self.number + self.data.count(b"\n", 0, count)
        return _Piece(self.offset + count, number, self.data[count:])


def read(chunks: Iterable[bytes]) -> Log:
    """Read a log of any size in bounded memory.

    Args:
        chunks: the log's bytes in order; a few MiB each is the best size.
    """
    begin, size, rest = [], 0, filter(None, chunks)
    for chunk in rest:
        begin.append(chunk)
        size += len(chunk)
        if size > HEAD_BYTES + TAIL_BYTES:
            break
    else:  # all of it is kept, so no search is needed
        return log_reader.read(begin)
    reader = _Reader()
    while begin:  # each chunk is released once it is read
        reader.feed(begin.pop(0))
    for chunk in rest:
        reader.feed(chunk)
    return reader.log()


class _Reader:
    """Keep the head, the tail and the mentions of a stream."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail: deque[_Piece] = deque()
        self._tail_bytes = 0
        self._first: list[_Piece] = []
        self._first_bytes = 0
        self._last: deque[_Piece] = deque()
        self._last_bytes = 0
        self._offset = 0
        self._newlines = 0
        self._carry = b""  # end of the searched part: context of later mentions

    def feed(self, chunk: bytes) -> None:
        if len(self._head) < HEAD_BYTES:
            self._head += chunk[: HEAD_BYTES - len(self._head)]
        self._search(chunk)
        self._keep_tail(_Piece(self._offset, self._newlines + 1, chunk))
        self._offset += len(chunk)
        self._newlines += chunk.count(b"\n")

    def _search(self, chunk: bytes) -> None:
        block = self._carry + chunk
        begin = self._offset - len(self._carry)
        number = self._newlines - self._carry.count(b"\n")
        done = 0
        for start, end in _windows(block, min(len(self._carry), AFTER_BYTES)):
            number += block.count(b"\n", done, start)
            done = start
            self._keep_mention(_Piece(begin + start, number + 1, block[start:end]))
        self._carry = block[-(BEFORE_BYTES + AFTER_BYTES) :]

    def _keep_mention(self, piece: _Piece) -> None:
        if piece.end <= HEAD_BYTES:
            return
        left = FIRST_BYTES - self._first_bytes
        if left > 0:
            self._first.append(replace(piece, data=piece.data[:left]))
            self._first_bytes += len(self._first[-1].data)
            piece = piece.without(left)
        piece = piece.without(len(piece.data) - LAST_BYTES)
        if not piece.data:
            return
        self._last.append(piece)
        self._last_bytes += len(piece.data)
        while self._last_bytes > LAST_BYTES and len(self._last) > 1:
            self._last_bytes -= len(self._last.popleft().data)

    def _keep_tail(self, piece: _Piece) -> None:
        self._tail.append(piece)
        self._tail_bytes += len(piece.data)
        while self._tail_bytes - len(self._tail[0].data) >= TAIL_BYTES:
            self._tail_bytes -= len(self._tail.popleft().data)

    def log(self) -> Log:
        pieces = _joined([_Piece(0, 1, bytes(self._head)), *self._first, *self._last, self._end()])
        lines = [line for one in pieces for line in log_reader.lines_of(one.data, one.number)]
        return Log(log_reader.cleaned(lines), self._newlines + 1, len(pieces) == 1)

    def _end(self) -> _Piece:
        data = b"".join(piece.data for piece in self._tail)
        first = self._tail[0]
        return _Piece(first.offset, first.number, data).without(len(data) - TAIL_BYTES)


def _windows(block: bytes, searched_from: int) -> list[tuple[int, int]]:
    """Return the stretches of a block around its mentions, in order and merged."""
    found: list[tuple[int, int]] = []
    for word in _MENTIONS:
        at = block.find(word, searched_from)
        while at >= 0:
            found.append((_line_start(block, at), min(len(block), at + AFTER_BYTES)))
            at = block.find(word, at + AFTER_BYTES)
    merged: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _line_start(block: bytes, at: int) -> int:
    """Return where the context before a mention begins, if possible at the start of a line."""
    floor = max(0, at - BEFORE_BYTES)
    newline = block.find(b"\n", floor, at)
    return newline + 1 if floor and newline >= 0 else floor


def _joined(pieces: Iterable[_Piece]) -> list[_Piece]:
    """Return the pieces in order, without overlaps; adjacent ones are joined."""
    done: list[_Piece] = []
    for piece in sorted(pieces, key=lambda p: (p.offset, -len(p.data))):
        if done and piece.offset <= done[-1].end:
            if fresh := piece.data[done[-1].end - piece.offset :]:
                done[-1] = replace(done[-1], data=done[-1].data + fresh)
        elif piece.data:
            done.append(piece)
    return done
