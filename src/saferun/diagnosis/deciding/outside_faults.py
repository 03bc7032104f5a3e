"""Pure: whether an exception is a fault of the world outside the job, by what it is.

The table knowledge/outside_faults.yaml decides: by error numbers, classes, answers of servers and
the path in the message, whatever library raised the exception.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.diagnosis.reading import user_frame
from saferun.diagnosis.reading.raised import Raised
from saferun.diagnosis.signatures import Outside

_CHARS = 4000  # characters of a message that are searched
# An object of a store: the path begins with a scheme. A link in a sentence is none.
_REMOTE = re.compile(
    r"(?:\A[\w.]{1,90}: |['\"(]|\b(?:at|file|find|open|read|load) )(?!file:|sqlite)(?:[a-z][a-z\d+.-]{1,20}://)"
    r"|(?<![\w/.:-])(?!https?:|file:|sqlite)[a-z][a-z\d+.-]{1,20}://\S",
    re.I,
)
_LOCAL = re.compile(
    r"(?:['\"(]|: |\bon )\.{0,2}/[\w.@+-]|['\"][\w.-]{1,200}/?[\w./ -]{0,400}['\"]\Z"
)


def row_of(raised: Raised, rows: Sequence[Outside]) -> Outside | None:
    """Return the row for an exception that is a fault of the outside; None for any other."""
    text = raised.text[:_CHARS]
    row = next((row for row in rows if _fits(row, raised, text)), None)
    return row if row and row.kind else None


def _fits(row: Outside, raised: Raised, text: str) -> bool:
    return (
        (not row.type or any(re.search(row.type, name) for name in (raised.type, *raised.bases)))
        and (not row.says or re.search(row.says, text, re.I) is not None)
        and (not row.path or row.path == _path(text))
        and not (row.not_own and _is_own(raised))
    )


def _path(text: str) -> str:
    """Return whether a message names a remote object, a local path or none."""
    return "remote" if _REMOTE.search(text) else "local" if _LOCAL.search(text) else "none"


def _is_own(raised: Raised) -> bool:
    """Return whether the script itself raised an exception, by a `raise` in its own file."""
    _, _, last = raised.frames.rpartition('File "')
    return " raise " in last and user_frame.is_users(f'File "{last}')
