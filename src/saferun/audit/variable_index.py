"""Pure: who reads an environment variable, looked up in the text of knowledge/variables.yaml.

A launch looks up a handful of 1,300 names, and may take 5 ms for that. The file has one line for
each name, so that the name is found in the unparsed text; a YAML parser would take 0.25 s.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

NOBODY = "nobody"  # in place of readers: a well-known name that no examined release reads


class Reader(NamedTuple):
    """The releases of one library that read one variable."""

    library: str  # "torch", "nccl"
    releases: tuple[str, ...]  # releases that read it, of all that were examined; oldest first
    files: tuple[str, ...]  # files in the newest of them; "=1", "=any": accepted values

    @property
    def certain(self) -> bool:
        """Return whether the readers were found in source code.

        A binary library may read a name that is not among its strings. A name that torch's own
        tests read proves nothing about the rest of torch.
        """
        source = [file for file in self.files if file.endswith((".py", ".h", ".hpp"))]
        return any(not file.startswith("testing/") for file in source)


def look_up(text: str, name: str) -> tuple[Reader, ...] | None:
    """Return the readers of a variable; () if nobody reads it, None for an unknown name.

    Args:
        text: content of knowledge/variables.yaml.
        name: the variable's name.
    """
    found = _after(text, f"\n  {name}: ")
    if found is None or found == NOBODY:
        return None if found is None else ()
    return tuple(parse(part, releases(text, part.split(" ", 1)[0])) for part in found.split("; "))


def parse(part: str, order: Sequence[str]) -> Reader:
    """Parse "torch 2.4.0..2.6.0,2.8.0.. file file"; `order` lists the library's releases."""
    library, ranges, *files = part.split()
    found: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("..")
        end = order.index(last) if last else len(order) - 1
        found += order[order.index(first) : end + 1]
    return Reader(library, tuple(found), tuple(files))


@lru_cache(maxsize=16)
def releases(text: str, library: str) -> tuple[str, ...]:
    """Return the releases of a library that were examined, oldest first.

    Args:
        text: content of knowledge/variables.yaml.
        library: "torch", "nccl".
    """
    return _list(_after(text, f"\n  {library}: ["))


@lru_cache(maxsize=4)
def listed(text: str, key: str) -> tuple[str, ...]:
    """Return one of the lists at the top: `owned`, `driver`, `others`.

    Args:
        text: content of knowledge/variables.yaml.
        key: the name of the list.
    """
    return _list(_after(text, f"\n{key}: ["))


@lru_cache(maxsize=1)
def names(text: str) -> tuple[str, ...]:
    """Return all names that have a reader."""
    lines = text[text.find("\nvariables:\n") :].split("\n  ")[1:]
    pairs = (line.split(": ", 1) for line in lines)
    return tuple(name for name, by in pairs if by.rstrip() != NOBODY)


def reads(reader: Reader, release: str, order: Sequence[str]) -> bool | None:
    """Return whether a release reads a variable.

    Args:
        reader: one library's reading of the variable.
        release: that library's installed release: "2.13.0+cpu", "2.14.0a0+git1234".
        order: the releases that were examined, oldest first.

    Returns:
        None if the data do not decide: the release is older or newer than all of them, or between
        two that differ.
    """
    plain = release.partition("+")[0]
    if plain in order:
        return plain in reader.releases
    below = [known for known in order if version(known) < version(plain)]
    if not below or len(below) == len(order):
        return None
    around = {below[-1] in reader.releases, order[len(below)] in reader.releases}
    return around.pop() if len(around) == 1 else None


def version(release: str) -> tuple[int, ...]:
    """Return the numbers of a release; a pre-release ("2.14.0a0") counts as its release."""
    found = re.match(r"[\d.]+", release)
    return tuple(int(number) for number in found[0].split(".") if number) if found else ()


def _after(text: str, start: str) -> str | None:
    at = text.find(start)
    return None if at < 0 else text[at + len(start) : text.find("\n", at + 1)]


def _list(line: str | None) -> tuple[str, ...]:
    return tuple(item.strip() for item in line.rstrip("]").split(",")) if line else ()
