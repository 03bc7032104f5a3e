"""Pure: the part of an attempt's tail for people, with the deciding line marked."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from saferun.diagnosis.reading import log_reader
from saferun.diagnosis.reading.log_lines import Line
from saferun.system.printable import shortened

_BEFORE, _AFTER, _END = 24, 8, 16  # lines around the deciding one, and at the end
_LINE_CHARS = 400
_SUMMARY_LINES = 400
# torchrun's own output: a remark at its start; after a rank's failure its own traceback, and a
# summary between two rules of `=`.
_BANNER = re.compile(r"torch/distributed/run\.py:\d+\]\s*$|\*{20}")
_STARS = re.compile(r"\*{20}")
_AGENT = re.compile(r"torch/distributed/\S+\] failed \(exitcode: -?\d+\) local_rank: ")
_RULE = re.compile(r"(?<!=)={40,}\s*$")
# A frame of a traceback outside the user's code.
_FRAME = re.compile(
    r"\s*File \"[^\"]*(?:/site-packages/|/dist-packages/|/lib/python3\.\d+/|<frozen )[^\"]*\", line"
)
_LEAST = 12  # characters of a deciding line that is searched for inside other lines


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a tail."""

    text: str
    decides: bool
    skipped: int  # lines left out before it
    fold: str = ""  # title of a part that few people read; "" for lines that are shown


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Some lines of one stream of an attempt."""

    stream: str  # "stdout", "stderr", "output" if both are one file
    rows: tuple[Row, ...]
    lines: int  # number of lines in the whole tail


def excerpt(stream: str, data: bytes, line: str) -> Excerpt:
    """Return the lines around the deciding one, and the last ones.

    Args:
        stream: the stream's name.
        data: the stream's end, as stored in the journal.
        line: the deciding line; "" if none.
    """
    lines = [one for one in log_reader.read((data,)).lines if one.raw.strip()]
    folds = _folds(lines)
    at, count = _deciding(lines, folds, line), len(lines)
    shown = set(range(max(0, count - (_END if at is not None else _BEFORE + _AFTER)), count))
    if at is not None:
        shown |= set(range(max(0, at - _BEFORE), min(count, at + _AFTER + 1)))
    rows, last = [], -1
    for index in sorted(shown):
        text, fold = shortened(lines[index].raw, _LINE_CHARS), folds[index]
        decides = index == at
        rows.append(Row(text, decides, index - last - 1, "" if decides else fold))
        last = index
    return Excerpt(stream, tuple(rows), count)


def _folds(lines: Sequence[Line]) -> list[str]:
    """Return the title of the rarely read part that each line belongs to; "" for other lines."""
    folds = [""] * len(lines)
    at = 0
    while at < len(lines):
        found = _fold(lines, at)
        end = found[1] if found else at + 1
        if found:
            folds[at:end] = [found[0]] * (end - at)
        at = end
    return folds


def _fold(lines: Sequence[Line], at: int) -> tuple[str, int] | None:
    """Return the title of a part that begins at a line, and where it ends; None if none begins."""
    text, raw = lines[at].text, lines[at].raw
    if _BANNER.search(raw) and any("OMP_NUM_THREADS" in one.raw for one in lines[at : at + 3]):
        end = next((n for n in range(at + 1, at + 6) if _is_stars(lines, n)), at)
        end = next((n for n in range(end + 1, at + 6) if _is_stars(lines, n)), end)
        return "torchrun's remark about OMP_NUM_THREADS", end + 1
    if _AGENT.search(raw):
        rest = range(at, min(len(lines), at + _SUMMARY_LINES))
        rules = [n for n in rest if _RULE.search(lines[n].raw)]
        if len(rules) >= 2:
            return "torchrun's own traceback and summary", rules[1] + 1
    if _FRAME.match(text):
        end = at
        while end < len(lines) and _FRAME.match(lines[end].text):
            own = _indent(lines[end].text)
            end += 1
            while end < len(lines) and _indent(lines[end].text) > own:
                end += 1
        return "frames below site-packages", end
    return None


def _is_stars(lines: Sequence[Line], at: int) -> bool:
    return at < len(lines) and bool(_STARS.search(lines[at].raw))


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


def _deciding(lines: Sequence[Line], folds: Sequence[str], line: str) -> int | None:
    """Return the index of the deciding line: whole, else without prefixes, else inside a line.

    A shown line comes before one in torchrun's summary, which repeats it far from its cause.
    """
    wanted = line.strip()
    bare = log_reader.strip_prefixes(wanted)[1].strip()
    if not bare:
        return None
    order = sorted(range(len(lines)), key=lambda at: bool(folds[at]))
    ways = (
        (at for at in order if lines[at].raw.strip() == wanted and not folds[at]),
        (at for at in order if lines[at].text.strip() == bare),
        (at for at in order if len(bare) >= _LEAST and bare in lines[at].raw),
    )
    return next(itertools.chain(*ways), None)
