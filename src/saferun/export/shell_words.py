"""Pure: the commands of a shell script, as words with their places in its text.

This module finds where words, quotes, substitutions, arrays, comments and here-documents begin and
end; it does not check whether the script is correct. An unclosed part ends with the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEREDOC = re.compile(r"<<(?!<)(-?)[ \t]*\\?(['\"]?)([\w.!-]+)\2")
_CONTINUED = re.compile(r"\\\r?\n")
_BLANK = re.compile(r"(?:[ \t\r]|\\\r?\n)+")
_DEFAULT = re.compile(r"[!#]?\w+(?:\[[^]]*\])?:?[-=+]")
_ASSIGNED = re.compile(r"\w+(?:\[[^]]*\])?\+?=")
# Opening of a part of a word -> its closing, and its kind ("": its content is not examined).
_CLOSING = {
    "\\": ("", ""),
    "'": ("'", "quoted"),
    '"': ('"', "quoted"),
    "$((": ("))", ""),
    "$(": (")", "substitution"),
    "`": ("`", "substitution"),
    "${": ("}", "default"),
}


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a word that may contain shell text.

    `kind` is "quoted" (between quotes), "substitution", "array" or "default" (of `${NAME:-…}`).
    """

    kind: str
    start: int
    end: int
    quote: str = ""


@dataclass(frozen=True, slots=True)
class Word:
    """One word as written, with its quotes."""

    text: str
    start: int
    end: int
    regions: tuple[Region, ...] = ()

    @property
    def plain(self) -> str:
        """Return the word without quotes around the whole of it."""
        return self.text[1:-1] if re.fullmatch(r"\"[^\"]*\"|'[^']*'", self.text) else self.text


@dataclass(slots=True)
class Command:
    """A simple command. A redirection is a word `>` or `<`, followed by the file."""

    words: list[Word] = field(default_factory=list)
    documents: list[Region] = field(default_factory=list)  # the bodies of its here-documents


def commands(text: str, start: int, end: int, *, array: bool = False) -> Iterator[Command]:
    """Yield the commands in a part of a script, in order, but not the commands inside words.

    Args:
        text: the text of the whole script.
        start: where the part begins.
        end: where it ends.
        array: the part is the content of an array, in which a newline is a blank.
    """
    at, command = start, Command()
    waiting: list[tuple[Command, re.Match[str]]] = []
    while at < end:
        if blank := _BLANK.match(text, at, end):
            at = blank.end()
        elif text[at] == "#":
            at = _line_end(text, at, end)
        elif document := _HEREDOC.match(text, at, end):
            waiting.append((command, document))
            at = document.end()
        elif text[at] in "<>":
            command.words.append(Word(text[at], at, at + 1))
            at += 1
        elif array and text[at] == "\n":
            at += 1
        elif text[at] in ";&|()\n":
            at += 1
            if text[at - 1] == "\n":
                for owner, document in waiting:
                    body_start = at
                    body_end, at = _document(text, at, end, document)
                    owner.documents.append(Region("document", body_start, body_end))
                waiting.clear()
            yield command
            command = Command()
        else:
            word = _word(text, at, end)
            command.words.append(word)
            at = word.end
    yield command


def _document(text: str, at: int, end: int, opening: re.Match[str]) -> tuple[int, int]:
    """Return where a here-document's body ends, and where the script continues.

    Without a closing line it is no here-document: `<<` shifts bits in `((…))`.
    """
    indent = r"[ \t]*" if opening[1] else ""
    last = re.compile(rf"^{indent}{re.escape(opening[3])}[ \t\r]*(?:\n|\Z)", re.MULTILINE)
    found = last.search(text, at, end)
    return (found.start(), found.end()) if found else (at, at)


def _word(text: str, start: int, end: int) -> Word:
    at, regions = start, list[Region]()
    while at < end and text[at] not in " \t\r\n;&|)<>" and not _CONTINUED.match(text, at, end):
        if text[at] == "(":
            if not _ASSIGNED.fullmatch(text[start:at]):
                break
            close = _closing(text, at + 1, end, ")")
            regions.append(Region("array", at + 1, close))
            at = close + 1
        else:
            at = _part(text, at, end, regions)
    at = min(max(at, start + 1), end)
    return Word(text[start:at], start, at, tuple(regions))


def _part(text: str, at: int, end: int, regions: list[Region] | None = None) -> int:
    """Return the end of the character, the quotes or the substitution at `at`.

    Args:
        text: the text of the whole script.
        at: the place where it begins.
        end: where the part of the script ends.
        regions: list that gets the regions inside it; None only finds its end.
    """
    opening = next((opening for opening in _CLOSING if text.startswith(opening, at)), None)
    if opening is None:
        return at + 1
    closing, kind = _CLOSING[opening]
    if opening == "\\":
        return at + 2
    begin = at + len(opening)
    close = text.find("'", begin, end) if opening == "'" else _closing(text, begin, end, closing)
    close = end if close < 0 else close
    if kind == "default":
        default = _DEFAULT.match(text, begin, close)
        begin = default.end() if default else close
    if kind and regions is not None:
        regions.append(Region(kind, begin, close, opening if kind == "quoted" else ""))
        if opening in ('"', "${"):
            _inner(text, begin, close, regions)
    return min(close + len(closing), end)


def _inner(text: str, at: int, end: int, regions: list[Region]) -> None:
    """Collect the substitutions and defaults inside double quotes or a default."""
    while at < end:
        at = _part(text, at, end, regions) if text[at] in "\\$`" else at + 1


def _closing(text: str, at: int, end: int, closing: str) -> int:
    """Return where the text that began before `at` closes; `end` if it never does."""
    depth = 0
    while at < end:
        if depth == 0 and text.startswith(closing, at):
            return at
        if closing in (")", "))") and text[at] in "()":
            depth += 1 if text[at] == "(" else -1
        elif closing == ")" and text[at] == "#" and text[at - 1] in " \t\n":
            at = _line_end(text, at, end)
            continue
        if text[at] == "\\" or (text[at] in "'\"`$" and not (closing == '"' and text[at] == "'")):
            at = _part(text, at, end)
        else:
            at += 1
    return end


def _line_end(text: str, at: int, end: int) -> int:
    found = text.find("\n", at, end)
    return end if found < 0 else found
