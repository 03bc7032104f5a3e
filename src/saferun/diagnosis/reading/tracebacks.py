"""Pure: the Python exceptions in a log, with their frames, messages and chains.

If prefixes name ranks, each rank is read separately. Fragments are read, too: an exception's line
is recognised without "Traceback" before it, and frames without an exception after them are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from saferun.diagnosis.reading import cpp_exceptions
from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import THROWN, Raised

MESSAGE_LINES = 24  # lines kept of one exception's message
FRAME_LINES = 80
MOST = 300  # most exceptions of a log: the first and the last ones
_TRACEBACK = "Traceback (most recent call last)"
_DIRECT = "direct cause of the following exception"
_DURING = "During handling of the above exception"
_ORIGINAL = "Original Traceback"  # of a worker's exception that its parent raises again
_NAME = r"(?:[A-Za-z_]\w{0,80}\.){0,8}"
# The line of an exception: a dotted name that ends like an exception's name, then `:` or nothing.
_RAISED = re.compile(
    rf"(?P<type>{_NAME}(?:_?[A-Z]\w{{2,80}}(?:Failed|Hit|Unsupported|Missing|Resources|ProcessPool)"
    r"|(?:_?[A-Z]\w{0,80})?(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Abort|Pruned|Exhausted|Conflict|Invalid"
    r"|NotFound|Expired|Cancelled|Denied|Mismatch\w{0,30}))\b)(?P<args>\((?:['\"].{0,3900})?\)?)?"
    r"(?P<colon>:(?=\s|$))?(?P<message>.*)"
)
_ANY_NAME = re.compile(rf"(?P<type>{_NAME}[A-Za-z_]\w{{0,80}})(?P<colon>:(?=\s|$))?(?P<message>.*)")
_QUOTED_EXCEPTION = re.compile(
    r"\b(?P<type>RayTaskError(?=\(\w{1,80}\):)"
    r"|[A-Z]\w{0,80}(?:Error|Exception)(?=\(['\"].)"
    r"|(?<=Caught )[A-Z]\w{0,80}(?= in (?:DataLoader worker|replica|pin memory)))"
)
# Ranks that write at the same time lose newlines: a traceback's line directly follows the name.
_GLUED = re.compile(r" {4,64}(?:assert |raise |return |File \"|\w{1,80}[.(]|\w{1,80} = )")
# Such ranks also lose the newline between two names: the same name then stands twice or more.
_DOUBLED = re.compile(r"([A-Z]\w{2,60}?(?:Error|Exception))\1{1,8}$")
_POINTER = "❱"  # a boxed traceback (rich) marks the failed line with it
# Beginnings of lines that end a message.
_OTHER = re.compile(
    r"(?:ERROR|INFO|WARNING|DEBUG|CRITICAL)[:\s]|\[?[WEIF]\d{3,4} |\[[EWIF] |={8}|-{8}"
    r"|wandb: |srun: |slurmstepd: |Failures:|Root Cause|Traceback|  File \"|E\d{4} "
    r"|Process finished with |Error: Process completed|command terminated with |FATAL: "
    r"|'\(\w{1,80}Error\(|During handling|The above exception"
    r"|\S{1,200}:\d{1,6}: |  (?:time|host|rank|exitcode|error_file|traceback) {1,6}: "
    r"|(?:Killed|Terminated|Aborted|Hangup|Quit|Segmentation fault|Bus error)(?: \(core dumped\))?$"
)
# The last output of another process. It continues a message only if that has the same subject.
_ELSEWHERE = re.compile(
    r"\s{0,4}(?:(?P<nccl>nccl[A-Z]\w{2,40}: |Last error:)|(?P<http>\(?HTTPS?ConnectionPool\()"
    r"|(?P<actor>The actor (?:is dead|died) )"
    r"|terminate called|what\(\): )"
)
# Phrases of a program that continues: the line (lower case) reports something that is over or will
# be retried. huggingface_hub warns so about optional requests; wandb sends later.
GOES_ON = re.compile(
    r"\bretrying\b|\bwill retry\b|\bretry loop\b|\b(?:retry|attempt) \d{1,3} ?(?:/|of) ?\d{1,3}\b"
    r"|\bskipp(?:ed|ing)\b|\bfalling back\b|\bsuppressed\b|\bignoring\b"
    r"|\bthrown while requesting\b|^wandb: (?:error|warning) error while calling\b"
)
_EXIT_BARRIER = "Error waiting on exit barrier"  # from torchrun's agent, if a node has gone first
_BACKGROUND = (
    "Exception ignored ",  # followed by "in: " or, from 3.14 on, "while calling deallocator"
    "Exception in thread",
    "Error in atexit",
    "Error in sys.excep",
    "--- Logging error ---",
)
_BESIDE_LINES = 2  # most lines of other processes between such a line and its traceback
# A thread of multiprocessing (resource_sharer.py) that prints a failure and continues. If a job is
# killed, this thread sees the end of its peers a moment before its own.
_SERVING = re.compile(r"multiprocessing/resource_sharer\.py\", line \d+, in _serve\b")
_PEER_ENDED = ("ConnectionResetError", "ConnectionAbortedError", "BrokenPipeError", "EOFError")
_WARNED = re.compile(r"Warning\b")
_BOXED = re.compile(r"/\S{1,400}\.py:\d{1,7} in \S{1,200}$")  # a frame in a traceback of rich
# A frame of what a failed script still does: it closes what is open, and reports.
_CLEANS_UP = re.compile(
    r"(?m), in __exit__\b|^[ \t]{1,40}(?:\w{1,40}\.){1,4}"
    r"(?:finish|close|shutdown|destroy_process_group|end_run|alert)\(.{0,80}\)$"
)
# The last frame of a signal handler, recognised by usual names of such functions.
_IN_HANDLER = re.compile(r", in \w{0,40}(?:handler|signal|sig[a-z]{3,6})$", re.I | re.M)
_NOT_RAISED = re.compile(r"(?i:warning\b)|\braise ")  # a warning, or a source line


def _after_frames(text: str) -> re.Match[str] | None:
    """Match an exception of any name, but not a program's own prefix (`wandb: `)."""
    if _OTHER.match(text):
        return None
    if found := _RAISED.match(text):
        return found
    found = _ANY_NAME.match(text)
    program = found is not None and found["type"].islower() and "." not in found["type"]
    return None if program else found


@dataclass(frozen=True, slots=True)
class Tracebacks:
    """The exceptions of a log, and the lines that are only frames of their tracebacks."""

    raised: tuple[Raised, ...]
    framed: frozenset[int]  # indices of lines, those above the frames too

    def without_consequences(self) -> Tracebacks:
        """Leave out exceptions that were raised while another one ended a `with` block or the job.

        Objects closed there are incomplete: an archive that could not be written has a wrong size.
        An exception from a signal handler stays, since it can come at any place of the program.
        """
        over = [
            one
            for one in self.raised
            if one.link == "context"
            and _CLEANS_UP.search(one.frames)
            and not _IN_HANDLER.search(one.frames.rpartition('File "')[2])
        ]
        rows = {row for one in over for row in one.rows}
        kept = tuple(one for one in self.raised if one not in over)
        return Tracebacks(kept, self.framed | rows)


class _Stream:
    """Read the lines of one rank, in order."""

    def __init__(self, reader: _Reader, rank: int | None) -> None:
        self._reader = reader
        self._rank = rank
        self._inside = False
        self._indent = 0
        self._frames: list[str] = []
        self._chain = 0
        self._link = ""
        self._rows: list[int] = []  # lines of the message that is being read
        self._open: tuple[str, str, bool] | None = None  # its exception: type, frames, headed
        self._background = 0  # remaining lines in which a background traceback may begin
        self._framed_at = 0
        self._headed = False  # the head of a traceback was read, but not its exception

    def read(self, at: int, text: str) -> None:
        """Read one line of the rank.

        Args:
            at: the line's index.
            text: the line without prefixes.
        """
        if text.lstrip().startswith((_TRACEBACK, *_BACKGROUND)):
            self._reader.framed.add(at)
        if _TRACEBACK in text:
            self._begin(text)
        elif _DIRECT in text or _DURING in text:
            self.close()
            self._link = "cause" if _DIRECT in text else "context"
        elif text.startswith(_BACKGROUND) or _EXIT_BARRIER in text[:160]:
            self.close()
            self._background = 1 + _BESIDE_LINES
        elif self._inside:
            self._read_inside(at, text)
        else:
            self._read_outside(at, text)
            if self._background and text.strip() and not (self._rows or self._frames):
                self._background -= 1

    def _begin(self, text: str) -> None:
        self.close()
        if _ORIGINAL in text and self._chain:
            self._link = "original"
        if self._headed and self._frames:
            self._opened(self._framed_at, "", headed=True)
            self.close()
        self._inside = self._headed = True
        self._indent = len(text) - len(text.lstrip())
        self._frames = []

    def _read_inside(self, at: int, text: str) -> None:
        indent = len(text) - len(text.lstrip())
        if not text.strip() or indent > self._indent or text[0] in "│╭╰^" or 'File "' in text[:12]:
            self._framed(at, text)
            return
        self._inside = False
        found = _after_frames(text.lstrip())
        if found and (found["colon"] or not found["message"].strip() or _looks_raised(found)):
            self._opened(at, found["type"], headed=True)

    def _read_outside(self, at: int, text: str) -> None:
        found = _RAISED.match(text.lstrip()) if "r" in text else None
        inside_message = self._rows and text.startswith(" ")
        if found and not inside_message and _looks_raised(found):
            self.close()
            self._opened(at, found["type"], headed=False)
            return
        if (
            'File "' in text[:16]
            or _POINTER in text[:6]
            or (text.startswith("  /") and _BOXED.match(text.strip()))
            or (self._frames and text.startswith("    "))
        ):
            self.close()
            self._framed(at, text)
        elif self._rows:
            self._continue_message(at, text)
        elif (quoted := _quoted(text)) and not _NOT_RAISED.search(text):
            self._opened(at, quoted["type"], headed=False)

    def _framed(self, at: int, text: str) -> None:
        """Store a line of the traceback: at most FRAME_LINES in all, half from each end."""
        self._reader.framed.add(at)
        if not text.strip():
            return
        if len(self._frames) >= FRAME_LINES:
            del self._frames[FRAME_LINES // 2]
        self._frames.append(text)
        if "│" not in text or _POINTER in text[:6]:  # in a box, only the failed line
            self._framed_at = at

    def end(self) -> None:
        """Emit what the end of the log has cut.

        It is a `raise` whose exception was not printed, or a traceback without its exception (the
        type is then "").
        """
        self.close()
        pointed = [text for text in self._frames if _POINTER in text[:6]]
        for text in [*pointed[-1:], *reversed(self._frames[-2:])]:
            found = THROWN.search(text)
            if found:
                self._reader.framed.discard(self._framed_at)
                self._opened(self._framed_at, found["type"], headed=False)
                self.close()
                return
        if self._frames:
            self._opened(self._framed_at, "", headed=self._headed or bool(pointed))
            self.close()

    def _continue_message(self, at: int, text: str) -> None:
        full = len(self._rows) >= MESSAGE_LINES
        if full or _OTHER.match(text) or self._is_elsewhere(text) or self._is_over():
            self.close()
        elif text.strip():
            self._rows.append(at)

    def _is_elsewhere(self, text: str) -> bool:
        """Return whether a line below a message belongs to another process."""
        found = _ELSEWHERE.match(text)
        if found is None:
            return False
        subject = found.lastgroup
        return subject is None or subject not in self._reader.lower(self._rows[0])

    def _is_over(self) -> bool:
        """Return whether the message ends with its first line.

        It does if a program that continues only mentions the exception, or after `Error: `, which
        any program may print.
        """
        kind, _, headed = self._open or ("", "", True)
        if headed:
            return False
        return kind == "Error" or bool(GOES_ON.search(self._reader.lower(self._rows[0])))

    def _opened(self, at: int, name: str, *, headed: bool) -> None:
        self._rows = [at]
        self._open = (_DOUBLED.sub(r"\1", name), "\n".join(self._frames), headed)
        self._frames = []
        self._headed = False

    def close(self) -> None:
        """Emit the exception whose message has ended."""
        if self._open is None:
            return
        kind, frames, headed = self._open
        if not self._link:
            self._chain = self._reader.next_chain()
        serving = kind.endswith(_PEER_ENDED) and _SERVING.search(frames)
        self._reader.raised.append(
            Raised(
                at=self._rows[0],
                rank=self._rank,
                type=kind,
                rows=tuple(self._rows),
                text=self._reader.message(self._rows),
                frames=frames,
                chain=self._chain,
                link=self._link,
                background=self._background > 0 or bool(serving),
                headed=headed,
            )
        )
        self._open, self._rows, self._link, self._background = None, [], "", 0


def _quoted(text: str) -> re.Match[str] | None:
    """Return the exception that a line quotes."""
    may = "Error(" in text or "Exception(" in text or "Caught " in text  # cheap, for every line
    return _QUOTED_EXCEPTION.search(text) if may else None


def _looks_raised(found: re.Match[str]) -> bool:
    """Return whether a match is an exception's line and not prose that begins with such a word."""
    if _WARNED.search(found["type"]):
        return False
    groups = found.groupdict()
    if groups.get("colon") or groups.get("args") or _DOUBLED.search(found["type"]):
        return True
    alone = not found["message"].strip() or _GLUED.match(found["message"]) is not None
    return alone and not found["type"].islower()


class _Reader:
    """Read a log, with one stream for each rank's lines."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._streams: dict[int | None, _Stream] = {}
        self._chains = 0
        self.raised: list[Raised] = []
        self.framed: set[int] = set()

    def lower(self, row: int) -> str:
        """Return a line in lower case."""
        return self._lines[row].text.lower()

    def message(self, rows: Sequence[int]) -> str:
        """Return lines as one text."""
        return "\n".join(self._lines[row].text.strip() for row in rows)

    def next_chain(self) -> int:
        """Return the number of a new chain of exceptions."""
        self._chains += 1
        return self._chains

    def run(self, more: Sequence[Raised]) -> Tracebacks:
        """Read all lines; `more` as for `find`."""
        for at, line in enumerate(self._lines):
            if line.rank not in self._streams:
                self._streams[line.rank] = _Stream(self, line.rank)
            self._streams[line.rank].read(at, line.text)
        for stream in self._streams.values():
            stream.end()
        found = [*self.raised, *cpp_exceptions.find(self._lines), *more]
        raised = sorted(found, key=lambda raised: raised.at)
        if len(raised) > 2 * MOST:
            raised = raised[:MOST] + raised[-MOST:]
        return Tracebacks(tuple(raised), frozenset(self.framed))


def find(lines: Sequence[Line], more: Sequence[Raised] = ()) -> Tracebacks:
    """Return the exceptions in a log's lines, in the order of their lines.

    Args:
        lines: the log's lines.
        more: exceptions of other languages than Python and C++ in the lines.
    """
    return _Reader(lines).run(more)
