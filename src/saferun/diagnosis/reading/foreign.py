"""Pure: the exceptions that other languages' runtimes print when they end a process.

C++ (`terminate called`, `what(): X`), glog (`Check failed: X`), Rust (`panicked at`), Go (`panic:`)
and Java (`Exception in thread "main"`) each state a type or none, and a message that means the same
as a Python exception's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from saferun.diagnosis.reading.log_lines import Line
from saferun.named_tuple import NamedTuple

_NEAR = 8  # lines: other ranks' lines may stand between two of one message
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?P<type>.{1,200}?)'")
_WHAT = re.compile(r"^\s{0,8}what\(\):\s{0,4}(?P<text>\S.*)")
_LIBCXX = re.compile(
    r"libc\+\+abi(?:\.dylib)?: terminating (?:due to|with) uncaught exception"
    r"(?: of type (?P<type>.{1,200}?))?: (?P<text>.*)"
)
_PANICKED = re.compile(
    r"^thread '(?P<thread>[^']{0,80})'(?: \(\d{1,9}\))? panicked at "
    r"(?:'(?P<quoted>.{1,2000})', )?(?P<place>\S{1,200}:\d{1,6}:\d{1,6}):?$"
)
_GO = re.compile(r"^(?:panic|fatal error): (?P<text>\S.*)")
_GOROUTINE = re.compile(r"^(?:goroutine \d{1,9} \[|\[signal SIG)")
_JAVA = re.compile(
    r"^Exception in thread \"(?P<thread>[^\"]{1,80})\" "
    r"(?P<type>(?:[a-z]\w{0,60}\.){1,10}[A-Z]\w{0,80})(?P<text>(?:: .*)?)$"
)
# glog's, and that of the libraries which log as it does: its level F ends the process
_CHECK = re.compile(
    r"^(?:(?:.{0,80}: )?F(?:\d{4} [\d:.]{8,20} {1,6}\d{1,9})? \S{1,160}:\d{1,6}\] )?"
    r"(?P<text>Check failed: \S.{0,2000})"
)
_WORDS = (
    "Check failed: ",
    "what():",
    "libc++abi",
    "panicked at ",
    "panic: ",
    "fatal error: ",
    "Exception in thread",
)


class Thrown(NamedTuple):
    """One exception of another language."""

    at: int  # index of the line that states its message
    rank: int | None
    type: str
    text: str  # type and message, in the words of the runtime
    ends: bool  # it ends the process, and not only a thread
    rows: tuple[int, ...] = ()  # indices of its other lines


def find(lines: Sequence[Line]) -> list[Thrown]:
    """Return the exceptions of other languages in a log's lines, in order."""
    whole = "\n".join([line.text for line in lines])
    words = [word for word in _WORDS if word in whole]
    return [
        thrown
        for at, line in enumerate(lines if words else ())
        if any(word in line.text for word in words)
        for thrown in _thrown(lines, at, line)
    ]


def _thrown(lines: Sequence[Line], at: int, line: Line) -> Iterator[Thrown]:
    if found := _WHAT.match(line.text):
        above, kind = _type_above(lines, at)
        head = f"terminate called after throwing an instance of '{kind}'\n"
        yield Thrown(at, line.rank, kind, head + line.text.strip(), ends=True, rows=above)
    elif found := _LIBCXX.search(line.text):
        yield Thrown(at, line.rank, found["type"] or "std::exception", found[0], ends=True)
    elif found := _PANICKED.match(line.text):
        row = at if found["quoted"] else next(_below(lines, at), at)
        text = found["quoted"] or lines[row].text.strip()
        yield Thrown(row, line.rank, "panic", f"panicked at {found['place']}: {text}", ends=True)
    elif found := _GO.match(line.text):
        if any(_GOROUTINE.match(lines[row].text) for row in _below(lines, at)):
            yield Thrown(at, line.rank, "panic", line.text.strip(), ends=True)
    elif found := _CHECK.match(line.text):
        yield Thrown(at, line.rank, "check", found["text"].strip(), ends=True)
    elif found := _JAVA.match(line.text):
        ends = found["thread"] == "main"
        yield Thrown(at, line.rank, found["type"], found["type"] + found["text"], ends)


def _type_above(lines: Sequence[Line], at: int) -> tuple[tuple[int, ...], str]:
    """Return the line above the message of a C++ exception, and the type that it names."""
    for row in range(at - 1, max(-1, at - _NEAR), -1):
        if lines[row].rank == lines[at].rank and (found := _TERMINATED.search(lines[row].text)):
            return (row,), found["type"]
    return (), "std::exception"


def _below(lines: Sequence[Line], at: int) -> Iterator[int]:
    """Yield the next lines of the same rank that are not empty."""
    for row in range(at + 1, min(len(lines), at + _NEAR)):
        if lines[row].rank == lines[at].rank and lines[row].text.strip():
            yield row
