"""Pure: findings as a report for people and as JSON for programs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from saferun.base.rank_numbers import ranks_text
from saferun.model import NOTE, OK, PROBLEM, Finding

WIDTH = 80
AREA = 14  # columns; a longer area has a line of its own
_FIRM = "\u00a0"  # no-break space: textwrap does not break there
_TITLES = {PROBLEM: "problems", NOTE: "notes", OK: "fine"}
_COLOURS = {PROBLEM: "31", NOTE: "33", OK: "32"}


def as_json(
    findings: Iterable[Finding], facts: Any, mask: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return the fixed JSON form (schema 1).

    Args:
        findings: all findings, in their order.
        facts: dataclasses, named tuples, mappings and sequences.
        mask: function that removes secrets from a text of the facts; the findings are masked
            already.
    """
    rows = [finding._asdict() for finding in findings]
    return {"schema": 1, "findings": rows, "facts": plain(facts, mask)}


def plain(value: Any, mask: Callable[[str], str] = str) -> Any:
    """Return a value that JSON can hold: values with fields become objects, tuples as keys text."""
    if isinstance(value, str):
        return mask(value)
    names = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None)
    if names is not None:
        return {name: plain(getattr(value, name), mask) for name in names}
    if isinstance(value, Mapping):
        return {_key(key): plain(part, mask) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part, mask) for part in value]
    return value


def _key(key: Any) -> str:
    return " to ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def render(findings: Sequence[Finding], *, colour: bool = False) -> str:
    """Return the report: problems first, then notes, then what is in order.

    Args:
        findings: all findings, in their order.
        colour: whether to use ANSI escape sequences.
    """
    shown = merged(findings)
    blocks = [_head(shown)]
    for level in (PROBLEM, NOTE, OK):
        here = [finding for finding in shown if finding.level == level]
        if here:
            title = _TITLES[level]
            lines = [f"\033[1;{_COLOURS[level]}m{title}\033[0m" if colour else title]
            lines += [line for finding in here for line in _lines(finding)]
            blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _head(findings: Sequence[Finding]) -> str:
    counts = {level: sum(f.level == level for f in findings) for level in (PROBLEM, NOTE, OK)}
    problems, notes = counts[PROBLEM], counts[NOTE]
    if not problems and not notes:
        return f"all {counts[OK]} checks are fine"
    parts = [f"{problems or 'no'} problem{'' if problems == 1 else 's'}"]
    parts += [f"{notes or 'no'} note{'' if notes == 1 else 's'}", f"{counts[OK]} fine"]
    return ", ".join(parts)


def _lines(finding: Finding) -> Iterator[str]:
    """Yield the lines of a finding: its area in a column, the result, then detail and fix below."""
    indent = " " * (AREA + 4)
    first = f"  {finding.area:<{AREA}}  "
    if len(finding.area) > AREA:
        yield f"  {finding.area}"
        first = indent
    yield from _wrap(finding.what, first, indent)
    if finding.detail and finding.level != OK:
        yield from _wrap(f"({finding.detail})", indent, indent)
    if finding.fix:
        yield from _wrap(f"fix: {finding.fix}", indent, indent + "      ")


def _wrap(text: str, first: str, rest: str) -> list[str]:
    """Fill lines without breaking a URL or a command between backticks."""
    whole = re.sub(r"`[^`]+`", lambda found: found[0].replace(" ", _FIRM), text)
    lines = textwrap.wrap(
        whole,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_FIRM, " ") for line in lines] or [first.rstrip()]


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings; equal ones of several GPUs are merged at the first one's place."""
    same: dict[Finding, set[int]] = {}
    for finding in findings:
        number = re.fullmatch(r"GPU (\d+)", finding.area)
        key = finding._replace(area="GPU") if number else finding
        same.setdefault(key, set()).update([int(number[1])] if number else [])
    return [
        one._replace(area=f"GPU {ranks_text(numbers).partition(' ')[2]}") if numbers else one
        for one, numbers in same.items()
    ]
