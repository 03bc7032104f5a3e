"""Pure: C++ exceptions that end a process; torch's watchdogs and checks print them.

`terminate called` with `what(): X`, LLVM's `libc++abi: terminating`, and glog's `Check failed: X`
may state a type, and have a message that is read like a Python exception's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised

_NEAR = 8  # lines: those of other ranks may stand within one message
_TERMINATED = re.compile(r"terminate called after throwing an instance of '(?P<type>.{1,200}?)'")
_WHAT = re.compile(r"^\s{0,8}what\(\):\s{0,4}(?P<text>\S.*)")
_LLVM = re.compile(
    r"libc\+\+abi(?:\.dylib)?: terminating (?:due to|with) uncaught exception"
    r"(?: of type (?P<type>.{1,200}?))?: .*"
)
# A line of glog, or of a library that logs as it does; level F ends the process.
_CHECK = re.compile(
    r"^(?:(?:.{0,80}: )?F(?:\d{4} [\d:.]{8,20} {1,6}\d{1,9})? \S{1,160}:\d{1,6}\] )?"
    r"(?P<text>Check failed: \S.{0,2000})"
)


def find(lines: Sequence[Line]) -> Iterator[Raised]:
    """Yield the exceptions of C++ in a log's lines; each is a chain of its own."""
    for at, line in enumerate(lines):
        text = line.text
        if "what():" in text and _WHAT.match(text):
            above, kind = _type_above(lines, at)
            head = f"terminate called after throwing an instance of '{kind}'\n"
            yield Raised(at, line.rank, kind, (at, *above), head + text.strip(), chain=-1 - at)
        elif "libc++abi" in text and (found := _LLVM.search(text)):
            kind = found["type"] or "std::exception"
            yield Raised(at, line.rank, kind, (at,), found[0], chain=-1 - at)
        elif "Check failed: " in text and (found := _CHECK.match(text)):
            yield Raised(at, line.rank, "check", (at,), found["text"].strip(), chain=-1 - at)


def _type_above(lines: Sequence[Line], at: int) -> tuple[tuple[int, ...], str]:
    """Return the line above a C++ exception's message, and the type that it names."""
    for row in range(at - 1, max(-1, at - _NEAR), -1):
        if lines[row].rank == lines[at].rank and (found := _TERMINATED.search(lines[row].text)):
            return (row,), found["type"]
    return (), "std::exception"
