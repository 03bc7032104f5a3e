"""The texts that a package may print, found in its files without importing it.

Of Python sources these are the string literals and the names of classes, by `ast`; of C sources,
which Triton builds where it runs, the literals; of a shared library the printable strings of its
constants. A place that is filled in is written as FILLED. A
text of a library is evidence that it may be printed, not proof; that a library lacks one proves
nothing, since compilers merge strings and cut short ones into the code.
"""

from __future__ import annotations

import ast
import bisect
import itertools
import mmap
import pathlib
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from saferun.base.phrases import says
from saferun.diagnosis.signatures import needle

FILLED = "\1"  # between two parts of a message
_LIBRARY = re.compile(r"^(?!libcu|libnv(?!rtc_)|libLLVM).*\.so(\.\d+)*$")  # NVIDIA's own
_NOT_ITS_OWN = re.compile(r"(?:^|/)(?:tests?|testing|_vendor|vendor|node_modules)/")
_PRINTABLE = re.compile(rb"[\x20-\x7e\n\t]{6,4000}")
_SYMBOL = re.compile(rb"_Z|N[0-9]|St|[.$]|[0-9]+[A-Za-z]|[\x20-\x40\x5b-\x60\x7b-\x7e]*$")  # names
_QUOTED = re.compile(r'"((?:[^"\\\n]|\\.){4,4000})"')
_MOST_CHARS = 4000  # of one literal; longer ones are templates of code


class Texts(NamedTuple):
    """What one release of a library may print, in lower case."""

    literals: tuple[str, ...]  # of Python
    strings: tuple[str, ...]  # of shared libraries


class Releases:
    """The texts of several releases, searched together since most of them are the same.

    Args:
        texts: of each release.
    """

    def __init__(self, texts: Sequence[Texts]) -> None:
        self._literals = _Merged([text.literals for text in texts])
        self._strings = _Merged([text.strings for text in texts])

    def that_print(self, phrase: str) -> frozenset[int]:
        """Return the indices of the releases that may print a phrase of knowledge/failures.yaml.

        The parts between ` ... ` follow each other in one message. A library's messages are often
        put together, so there they only need to be somewhere.
        """
        parts = needle(phrase)
        somewhere = [self._strings.with_text(part) for part in parts]
        return self._literals.with_text(*parts) | frozenset.intersection(*somewhere)


class _Merged:
    """The texts of several releases, each once."""

    def __init__(self, texts: Sequence[Iterable[str]]) -> None:
        owners: dict[str, set[int]] = {}
        for release, of_release in enumerate(texts):
            for text in of_release:
                owners.setdefault(text, set()).add(release)
        self._texts = list(owners)
        self._owners = list(owners.values())
        self._whole = "\0".join(self._texts)
        self._starts = [0, *itertools.accumulate(len(text) + 1 for text in self._texts)]

    def with_text(self, *parts: str) -> frozenset[int]:
        """Return the releases with a text in which the parts follow each other."""
        longest = max(parts, key=len)
        found: set[int] = set()
        at = self._whole.find(longest)
        while at >= 0:
            number = bisect.bisect_right(self._starts, at) - 1
            if says(parts, self._texts[number]):
                found |= self._owners[number]
            at = self._whole.find(longest, self._starts[number + 1])
        return frozenset(found)


def read(package: pathlib.Path) -> Texts:
    """Return the texts of an unpacked or installed package, such as `site-packages/torch`."""
    literals: set[str] = set()
    strings: set[bytes] = set()
    for path in sorted(package.rglob("*")):
        if _NOT_ITS_OWN.search(path.relative_to(package).as_posix()) or path.is_symlink():
            continue
        if path.suffix == ".py":
            literals |= set(_literals(path))
        elif path.suffix == ".c":
            literals |= set(_QUOTED.findall(path.read_text(encoding="utf-8", errors="replace")))
        elif _LIBRARY.search(path.name):
            strings |= _constants(path)
    lower = {text.decode("ascii").lower() for text in strings}
    return Texts(tuple(sorted({text.lower() for text in literals})), tuple(sorted(lower)))


# Python


def _literals(path: pathlib.Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # of another Python, or a template
        return
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # documents
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)):
            text = _text(node)
            if 3 < len(text.strip(FILLED)) <= _MOST_CHARS:
                yield text


def _text(node: ast.AST) -> str:
    """Return what a literal says; "" for what is none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or FILLED for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return f"{left or FILLED}{right or FILLED}" if left or right else ""
    return ""


# Shared libraries


def _constants(path: pathlib.Path) -> set[bytes]:
    """Return the printable strings of an ELF file's read-only data, without names of symbols."""
    with path.open("rb") as file:
        if path.stat().st_size < 64 or file.read(4) != b"\x7fELF":
            return set()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found: set[bytes] = set()
            for begin, end in _read_only(data):
                found.update(hit[0] for hit in _PRINTABLE.finditer(data, begin, end))
    return {text for text in found if not _SYMBOL.match(text)}


def _read_only(data: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the sections .rodata and .lrodata of a 64-bit ELF file."""
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    heads = [struct.unpack_from("<IIQQQQ", data, table + size * at) for at in range(count)]
    for name, _, _, _, offset, length in heads:
        start = heads[names][4] + name
        if data[start : data.find(b"\0", start)].startswith((b".rodata", b".lrodata")):
            yield offset, offset + length
