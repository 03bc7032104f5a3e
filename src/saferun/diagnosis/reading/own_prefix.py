"""Pure: remove a prefix that is specific to one log.

A scheduler, a wrapper or a person's logger may put anything before each line. Tracebacks reveal it:
their heads and frames begin with words that nothing else has, so the text before them is a prefix.
It is removed from every line that begins with it; only digits may differ.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from saferun.diagnosis.reading.log_lines import Line

_MOST = 4  # most prefixes of one log
_CHARS = 120  # longest prefix
_HEAD = "Traceback (most recent call last):"
_FRAME = re.compile(r'(?P<before>.{1,120}?) {1,2}File "[^"]{1,400}", line \d{1,9}')
_FRAMES = 2  # frames that must share a prefix if no head shows it
_PARTS = re.compile(r"\d+| +|[^\d ]+")


def without(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Return the lines without the prefixes that the log's tracebacks show.

    Args:
        lines: the log's lines, without the known prefixes.
    """
    prefixes = [re.compile(form) for form in _forms(lines)]
    if not prefixes:
        return tuple(lines)
    return tuple(_shortened(line, prefixes) for line in lines)


def _shortened(line: Line, prefixes: Sequence[re.Pattern[str]]) -> Line:
    for prefix in prefixes:
        if found := prefix.match(line.text):
            return line._replace(text=line.text[found.end() :])
    return line


def _forms(lines: Sequence[Line]) -> list[str]:
    """Return the forms of the log's prefixes as regular expressions, the most frequent first."""
    shown: Counter[str] = Counter()
    for at, line in enumerate(lines):
        text = line.text
        if _HEAD in text and (end := text.index(_HEAD)) <= _CHARS:
            form = _form(text[:end])
            if text[:end].strip() and at + 1 < len(lines) and re.match(form, lines[at + 1].text):
                shown[form] += _FRAMES
        elif 'File "' in text and (frame := _FRAME.match(text)) and frame["before"].strip():
            shown[_form(frame["before"])] += 1
    return [form for form, count in shown.most_common(_MOST) if count >= _FRAMES]


def _form(before: str) -> str:
    """Return a regular expression for a prefix that allows other digits and alignment blanks."""
    parts = _PARTS.findall(before)
    form = ""
    for at, part in enumerate(parts):
        if part.isdigit():
            form += r"\d{1,19}"
        elif part.isspace() and at + 1 < len(parts) and parts[at + 1].isdigit():
            form += " {1,9}" if at else ""
        else:
            form += re.escape(part)
    return f" {{0,9}}{form}" if before.lstrip()[:1].isdigit() else form
