"""Pure: one exception, as a log or an error file has it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The line of source that raised an exception whose own line is missing.
THROWN = re.compile(r"raise (?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})\(")


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception as printed."""

    at: int  # index of its line among the log's
    rank: int | None
    type: str  # "torch.OutOfMemoryError"; as printed
    rows: tuple[int, ...]  # indices of the lines of its message, the first is `at`
    text: str  # those lines
    frames: str = ""  # the traceback's lines before it
    chain: int = -1  # exceptions of one chain share it
    link: str = ""  # how it hangs on the one before: "", "cause", "context"
    background: bool = False  # a thread's, or at the interpreter's exit: the process went on
    headed: bool = False  # a whole traceback stood before it

    @property
    def name(self) -> str:
        """The type without its module."""
        return self.type.rsplit(".", 1)[-1]

    @property
    def is_thrown(self) -> bool:
        """Whether no more is known than the line of source that raised it."""
        return THROWN.match(self.text.lstrip()) is not None
