"""Pure: turn the bytes of a log into clean lines.

Colours, carriage returns and the prefixes of launchers, schedulers and containers are removed from
the lines. If such a prefix names a rank, the line keeps that rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from saferun.diagnosis.reading import own_prefix, records
from saferun.diagnosis.reading.log_lines import Line, Log

BAR_PARTS = 12  # states kept of a rewritten progress bar: so many first and last ones
LINE_CHARS = 4000  # longer lines are cut into pieces of this length

_ANSI = re.compile(
    rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]{0,500}(?:\x07|\x1b\\)|[()][A-Z0-9])"
)
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]+")
_UNPRINTED = bytes(code for code in (*range(32), 127) if code not in b"\t\n")

# A progress bar does not end its line, so the next output of a rank follows on that line. Lines
# copied from a screen have blanks up to its edge instead of line ends.
_BEHIND_A_BAR = re.compile(
    rb"(?<=\])(?=\[rank\d{1,5}\]:|\[[EWIF](?:\d{3,4})? |Traceback \(most recent call last\))"
    rb"|(?:(?<=\])|(?<= {8}))(?=(?:WARNING|ERROR|CRITICAL):[\w.]{1,80}:)"
)
_JOINED_LINES = (b"][", b"]T", b"]WARNING:", b"]ERROR:", b"        WARNING:", b"        ERROR:")

# One prefix, which is matched again on the rest. Counts are bounded, so that no match backtracks
# far.
_STAMP = r"\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_PREFIX = re.compile(
    r"""
      \[rank(?P<rank>\d{1,5})\]:[ ]?                       # torch's own
    | [0-9a-f]{8}[ ]\[rank=(?P<cluster>\d{1,5})\][ ]\|\|[ ]?   # determined
    | \[[A-Za-z_]{1,20}(?P<tee>\d{1,5})(?:\|\d{1,5})?\]:[ ]?   # torchrun --tee, torchx
    | std(?:err|out):[ ]                                # accelerate's own tests, some notebooks
    | \[(?:INFO|ERROR|CRITICAL)\][ ]{1,2}(?=[\w.]{1,80}(?:Error|Exception)\b)   # loggers
    | \[(?:ERROR|CRITICAL|FATAL)\][ ]?\[[\w./-]{1,80}(?::\w{1,60}){1,2}\][ ]?   # with a place
    | \[\d{4,9}\][ ](?=\S)                               # numbered lines of log viewers
    | \[\d{1,3},(?P<mpi>\d{1,5})\]<std(?:err|out)>:[ ]?   # mpirun --tag-output
    | [ ]{0,4}(?P<srun>\d{1,5}):[ ](?=[ ]{0,8}\D|\d{4}-)  # srun --label
    | \((?:\w{1,60}[ ](?:\w{1,20}[ ])?)?pid=\d{1,9}(?:,[ ]ip=[\d.]{1,20})?\)[ ]?  # ray
    | \[?"""
    + _STAMP
    + r"""\]?[ ]{0,3}(?:std(?:err|out)[ ][FP][ ])?        # ISO time: docker, kubectl, loggers
    | (?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[ ]{1,2}\d{1,2}[ ]\d\d:\d\d:\d\d
      [ ][\w.-]{1,64}[ ][\w.@/-]{1,64}(?:\[\d{1,9}\])?:[ ]   # syslog, journald
    | \[?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?\]?[ ]              # a time alone
    | \|[ ](?:ERROR|CRITICAL|WARNING|INFO|DEBUG)[ ]{1,5}\|[ ]   # loguru, behind its time
    | [\w.-]{1,60}-\w{1,12}[ ]{1,20}\|[ ]                 # docker compose, SageMaker
    | \d{1,3}(?:\.\d{1,3}){3}:[ ]                        # pdsh: DeepSpeed on several nodes
    | (?=[a-z0-9-]{1,60}\d:[ ])[a-z][a-z0-9]{0,30}(?:-[a-z0-9]{1,30}){1,6}:[ ]
    | \[[a-z][a-z0-9]{0,30}(?:-[a-z0-9]{1,30}){0,6}-\d{1,5}\][ ]   # the name of a worker
    | E\d{4}[ ]\d\d:\d\d:\d\d\.\d{1,9}[ ]\d{1,9}[ ][\w./-]{1,160}:\d{1,6}\]
      (?:[ ]\[\d{1,4}/\d{1,4}\])?(?:[ ]|$)             # torch's own loggers, errors only
    | (?!(?:global_?)?(?:step|epoch|iter|iteration|batch|train|val)s?/)
      [a-z][\w.-]{0,60}/\d{1,5}[ ]                       # torchx, NeMo-Run: role and replica
    | >[ ](?:ERROR|INFO|WARNING)[ ]{1,4}
    | (?:\w{1,20}=(?:"[^"\\]{0,80}"|[^\s"]{1,80})[ ]){1,6}(?:msg|message|err|error)="   # logfmt
    | "(?=\[rank\d{1,5}\]:)                              # SageMaker quotes a message
    | (?:ERROR|CRITICAL)[ ]\d\d-\d\d[ ]\d\d:\d\d:\d\d[ ]\[?[\w./]{1,80}:\d{1,6}\](?:[ ]|$)   # vLLM
    """,
    re.VERBOSE,
)
_MAX_PREFIXES = 4
_OF_THE_JOB = ("rank", "cluster")  # groups that name a rank of the whole job
_OF_A_NODE = ("tee", "mpi", "srun")  # groups whose number may be a rank of one node
_NOWHERE = (0, 0)
_RECORDS = 3  # nested records: of a logger, of a container, of collectors
_FORM = bytes.maketrans(b"123456789", b"0" * 9)
_RANK_INSIDE = re.compile(r"\[(?:PG [^\]]{0,80} )?[Rr]ank (\d{1,5})\]")
_NCCL_DEVICE = re.compile(r"[\w.-]{1,64}:\d{1,9}:\d{1,9} \[(\d{1,3})\] ")
_BOX = re.compile(r"\s{0,4}[│|]\s?")  # the left side of a box


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """The end of a line's prefixes, and the place of the rank in them."""

    end: int
    rank_from: int
    rank_to: int  # 0 if they name none

    def rank(self, text: str) -> int | None:
        """Return the rank that the prefixes of a line name."""
        return int(text[self.rank_from : self.rank_to]) if self.rank_to else None


_NOT_PLAIN = _Prefixes(-1, 0, 0)


def read(chunks: Iterable[bytes]) -> Log:
    """Read a whole log, or the last output of a live run.

    Args:
        chunks: the log's bytes in order; they are held in memory.
    """
    data = b"".join(chunks)
    if not data:
        return Log()
    return Log(cleaned(list(lines_of(data, 1))), data.count(b"\n") + 1)


def of_text(text: str) -> Log:
    """Read a text that is in memory."""
    return read([text.encode("utf-8", "surrogateescape")])


def cleaned(lines: list[Line]) -> tuple[Line, ...]:
    """Return the lines of a whole log, in order and without a prefix of this log's own."""
    return own_prefix.without(records.in_order(lines))


def lines_of(data: bytes, first: int) -> Iterator[Line]:
    """Yield the clean lines of a stretch of a log.

    Args:
        data: the bytes of the stretch.
        first: number of the first line, from 1.
    """
    data = data.replace(b"\r\n", b"\n")
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    known: dict[bytes, _Prefixes] = {}  # form of a row -> its prefixes; many rows share a form
    rows = zip(data.split(b"\n"), data.translate(_FORM).split(b"\n"), strict=True)
    for number, (row, form) in enumerate(rows, first):
        found = known.get(form)
        if found is None:
            raw = row.decode("utf-8", "replace").rstrip()
            found = known[form] = _prefixes(raw) if _is_plain(row) else _NOT_PLAIN
        if found is _NOT_PLAIN:
            yield from _of_row(number, row)
            continue
        raw = row.decode("utf-8", "replace").rstrip()
        yield Line._make((number, found.rank(raw), raw[found.end :], raw))


def _is_plain(row: bytes) -> bool:
    """Return whether a row is one line with only prefixes before it, whatever its digits."""
    return not (
        b"\\n" in row
        or row.endswith((b"}", b'"', b'",'))
        or len(row) > LINE_CHARS
        or "│".encode() in row
        or len(row.translate(None, _UNPRINTED)) < len(row)
        or len(_split_behind_bar(row)) > 1
    )


def _of_row(number: int, row: bytes) -> Iterator[Line]:
    """Yield the lines of a row, which may be a record or a progress bar, cleaned."""
    whole = row.rstrip(b"\r")  # a line of a terminal ends with one
    may_hold = b"\\n" in row or whole.endswith((b"}", b'"', b'",'))
    if may_hold and (unpacked := _unpacked(number, whole)):
        yield from unpacked
        return
    row = row.lstrip(b"\0")  # the hole in a file that was truncated while it was written
    for part in _parts(row):
        yield from _clean(number, part)


def _unpacked(number: int, row: bytes) -> list[Line]:
    """Return the lines of a record; [] if the row is no record of a failure."""
    before, text = strip_prefixes(_CONTROL.sub(b" ", row).decode("utf-8", "replace").rstrip())
    return [
        Line(number, rank, inner[:LINE_CHARS], raw[:LINE_CHARS])
        for rank, inner, raw in _of_record(text, before, _RECORDS)
    ]


def _of_record(text: str, before: int | None, depth: int) -> list[tuple[int | None, str, str]]:
    """Return rank, text and text with prefixes of each line of a record and of nested records."""
    if (found := records.unpack(text)) is None:
        return []
    named = before if found[0] is None else found[0]
    lines: list[tuple[int | None, str, str]] = []
    for raw in found[1]:
        rank, inner = strip_prefixes(raw)
        rank = named if rank is None else rank
        nested = _of_record(inner, rank, depth - 1) if depth and inner.endswith("}") else []
        lines += nested or [(rank, inner, raw)]
    return lines


def _parts(row: bytes) -> list[bytes]:
    """Return the first and the last states of a line that rewrites itself, such as a bar."""
    if b"\r" not in row:
        return _split_behind_bar(row)
    parts = [part for part in row.split(b"\r") if part] or [b""]
    if len(parts) > 2 * BAR_PARTS:
        parts = parts[:BAR_PARTS] + parts[-BAR_PARTS:]
    return parts[:-1] + _split_behind_bar(parts[-1])


def _split_behind_bar(part: bytes) -> list[bytes]:
    """Split a progress bar from the output that follows it on its line."""
    return _BEHIND_A_BAR.split(part) if any(sign in part for sign in _JOINED_LINES) else [part]


def _clean(number: int, part: bytes) -> Iterator[Line]:
    for begin in range(0, max(1, len(part)), LINE_CHARS):
        raw = _CONTROL.sub(b" ", part[begin : begin + LINE_CHARS]).decode("utf-8", "replace")
        raw = raw.rstrip()
        if raw or not begin:
            rank, text = strip_prefixes(raw)
            yield Line(number, rank, text, raw)


def strip_prefixes(raw: str) -> tuple[int | None, str]:
    """Remove the prefixes of launchers, schedulers and containers from a line.

    Returns:
        The rank that a prefix named (None if none did), and the rest of the line.
    """
    prefixes = _prefixes(raw)
    rank, rest = prefixes.rank(raw), raw[prefixes.end :]
    return rank, _unboxed(rest) if "│" in rest else rest


def _prefixes(text: str) -> _Prefixes:
    """Return where a line's prefixes end; digits do not matter."""
    end, rank = 0, _NOWHERE
    for _ in range(_MAX_PREFIXES):
        found = _PREFIX.match(text, end)
        if not found:
            break
        for name in _OF_THE_JOB if rank is not _NOWHERE else (*_OF_THE_JOB, *_OF_A_NODE):
            if found[name]:
                rank = found.span(name)
                break
        end = found.end()
    if rank is _NOWHERE:
        inside = _RANK_INSIDE.search(text, end) or _NCCL_DEVICE.match(text, end)
        rank = inside.span(1) if inside else rank
    return _Prefixes(end, *rank)


def _unboxed(text: str) -> str:
    """Replace the two sides of a box (rich) around a line by blanks."""
    if left := _BOX.match(text):
        text = "  " + text[left.end() :]
    inner = text.rstrip()
    return f"{inner[:-1].rstrip()}  " if inner.endswith("│") else text
