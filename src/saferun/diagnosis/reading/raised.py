"""Pure: one exception in a log or an error file."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The source line that raised an exception whose own line is missing.
THROWN = re.compile(r"raise (?P<type>(?:[A-Za-z_]\w{0,80}\.){0,8}[A-Z]\w{0,80})\(")


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception as printed."""

    at: int  # index of its line in the log
    rank: int | None
    type: str  # "torch.OutOfMemoryError"; as printed
    rows: tuple[int, ...]  # indices of the lines of its message, the first is `at`
    text: str  # those lines
    frames: str = ""  # lines of the traceback before it
    chain: int = -1  # number shared by the exceptions of one chain
    link: str = ""  # relation to the previous exception: "", "cause", "context", "original"
    background: bool = False  # in a thread, or at the interpreter's exit: the process continued
    headed: bool = False  # a complete traceback stands before it
    bases: tuple[str, ...] = ()  # the classes that its own derives from, where the rank told them

    @property
    def name(self) -> str:
        """Return the type without its module."""
        return self.type.rsplit(".", 1)[-1]

    @property
    def is_thrown(self) -> bool:
        """Return whether only the source line that raised it is known."""
        return THROWN.match(self.text.lstrip()) is not None
