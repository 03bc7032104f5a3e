"""Pure: the exceptions that other languages' runtimes print when they end a process.

The languages are Rust (`panicked at`), Go (`panic:`), Java (`Exception in thread "main"`) and C++
with LLVM's library (`libc++abi`). Each exception may state a type, and has a message that is read
like a Python exception's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from saferun.diagnosis.reading.log_lines import Line
from saferun.diagnosis.reading.raised import Raised

_NEAR = 8  # lines: those of other ranks may stand within one message
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
_WORDS = ("libc++abi", "panicked at ", "panic: ", "fatal error: ", "Exception in thread")


def find(lines: Sequence[Line]) -> list[Raised]:
    """Return the exceptions of other languages in a log's lines; each is a chain of its own."""
    whole = "\n".join([line.text for line in lines])
    words = [word for word in _WORDS if word in whole]
    return [
        raised
        for at, line in enumerate(lines if words else ())
        if any(word in line.text for word in words)
        and (raised := _raised(lines, at, line)) is not None
    ]


def _raised(lines: Sequence[Line], at: int, line: Line) -> Raised | None:
    ends = True  # whether it ends the process, not only a thread
    if found := _LIBCXX.search(line.text):
        kind, text = found["type"] or "std::exception", found[0]
    elif found := _PANICKED.match(line.text):
        at = at if found["quoted"] else next(_below(lines, at), at)
        message = found["quoted"] or lines[at].text.strip()
        kind, text = "panic", f"panicked at {found['place']}: {message}"
    elif _GO.match(line.text) and any(_GOROUTINE.match(lines[r].text) for r in _below(lines, at)):
        kind, text = "panic", line.text.strip()
    elif found := _JAVA.match(line.text):
        kind, text = found["type"], found["type"] + found["text"]
        ends = found["thread"] == "main"
    else:
        return None
    return Raised(at, line.rank, kind, (at,), text, chain=-1 - at, background=not ends)


def _below(lines: Sequence[Line], at: int) -> Iterator[int]:
    """Yield the next lines of the same rank that are not empty."""
    for row in range(at + 1, min(len(lines), at + _NEAR)):
        if lines[row].rank == lines[at].rank and lines[row].text.strip():
            yield row
