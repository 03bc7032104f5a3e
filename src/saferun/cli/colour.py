"""Colour, if the output is a terminal with colours and NO_COLOR is not set (no-color.org).

Only then is rich imported. No text is read as rich's markup: a job's output is shown as it is.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saferun.cli.options import echo
from saferun.system.printable import printable, shortened

if TYPE_CHECKING:  # rich takes 50 ms, and only a terminal gets colours
    from rich.text import Text

OUTCOMES = {"ok": "green", "failed": "red", "running": "cyan", "interrupted": "yellow"}
# Pattern of a line of `runs show` -> its style.
PAGE = {
    r"^run .+?: (?=ok)": "bold green",
    r"^run .+?: (?=failed)": "bold red",
    r"^run .+": "bold",
    r"^(?:worker \d+, )?attempt \d+:": "bold",
    r"^(?:  )?(?:failure|line) +.+": "red",
    r"^(?:  )?[a-z]+ {2,}": "dim",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its topic, its text and its style."""

    label: str
    text: str
    style: str = ""


def has_terminal() -> bool:
    """Return whether stdout is a terminal on which the cursor can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")


def is_wanted() -> bool:
    """Return whether the output is coloured."""
    return has_terminal() and not os.environ.get("NO_COLOR")


def echo_page(page: str, styles: Mapping[str, str] = PAGE, *, cut: bool = False) -> None:
    """Print a page for people.

    Args:
        page: the page's text.
        styles: styles by pattern, used if colour is wanted.
        cut: with colour, cut lines at the terminal's edge.
    """
    if not is_wanted():
        width = shutil.get_terminal_size().columns if cut and has_terminal() else None
        echo("\n".join(shortened(line, width) if width else line for line in page.split("\n")))
        return
    from rich.console import Console  # 50 ms, for a terminal alone
    from rich.text import Text  # 50 ms, for a terminal alone

    text = Text(printable(page, kept="\n\t"))
    for pattern, style in styles.items():
        text.highlight_regex(re.compile(pattern, re.MULTILINE), style)
    how: dict[str, Any] = {"no_wrap": True, "overflow": "ellipsis"} if cut else {"soft_wrap": True}
    Console().print(text, **how)


def echo_table(table: str) -> None:
    """Print a table of runs, with coloured outcomes."""
    at = table.partition("\n")[0].find("OUTCOME")
    before = rf"^.{{{at}}}"
    styles = {rf"(?<=\n){before[1:]}{word}\b.*": style for word, style in OUTCOMES.items()}
    echo_page(table, {r"\A.*": "bold", **styles}, cut=True)


def drawn(lines: Iterable[Line]) -> Text:
    """Return the lines of a watched run for rich's console; each is cut at the terminal's edge."""
    from rich.text import Text  # 50 ms, for a terminal alone

    whole = Text(no_wrap=True, overflow="ellipsis")
    for line in lines:
        whole.append(f"{line.label:<9}", "dim")
        whole.append(f"{line.text}\n", line.style)
    return whole
