"""Pure: add to a log's lines the signals that exit statuses of Windows stand for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.diagnosis.reading.log_lines import Line

# Statuses that Windows returns where Linux has a signal (NTSTATUS): numbers of 32 bits, signed or
# in hex.
#
# https://learn.microsoft.com/openspecs/windows_protocols/ms-erref/596a1078-e883-4972-9bbc-49e60bebca55
_SIGNALS = {
    0xC0000005: "SIGSEGV", 0xC00000FD: "SIGSEGV", 0xC0000374: "SIGSEGV", 0xC0000006: "SIGBUS",
    0xC0000094: "SIGFPE", 0xC000001D: "SIGILL", 0xC0000409: "SIGABRT", 0xC0000420: "SIGABRT",
    0xC000013A: "SIGINT", 0xC0000017: "SIGKILL",
}  # fmt: skip
_STATUS = re.compile(
    r"\b(?:exit|return|status|code|signal|exception)[^\n\d-]{0,40}?"
    r"(?:(?P<number>-10737\d{5}|322[12]\d{6})\b|(?P<hex>0xc0[0-9a-f]{6})\b)",
    re.I,
)
_HINTS = ("322", "-107", "0xc0", "0xC0")  # every line that holds a status has one of these


def named(lines: Sequence[Line]) -> list[Line]:
    """Return the lines; a Windows status is followed by the signal's name."""
    return [_named(line) if any(hint in line.text for hint in _HINTS) else line for line in lines]


def _named(line: Line) -> Line:
    found = _STATUS.search(line.text)
    if found is None:
        return line
    number = int(found["hex"], 16) if found["hex"] else int(found["number"]) & 0xFFFFFFFF
    name = _SIGNALS.get(number)
    if name is None:
        return line
    before, behind = line.text[: found.end()], line.text[found.end() :]
    return line._replace(text=f"{before} ({name}){behind}")
