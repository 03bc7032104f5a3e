"""Count lines of code: those with a token that is no comment and no docstring.

    python tools/count_code.py [DIRECTORY ...]

Without an argument it counts the package and its tests, by room.
"""

from __future__ import annotations

import ast
import collections
import pathlib
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(path: pathlib.Path) -> int:
    """Return how many lines of a Python file hold code."""
    with path.open("rb") as file:
        used = {
            line
            for token in tokenize.tokenize(file.readline)
            if token.type not in LAYOUT
            for line in range(token.start[0], token.end[0] + 1)
        }
    return len(used - docstring_lines(path))


def docstring_lines(path: pathlib.Path) -> set[int]:
    """Return the lines of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ) or not ast.get_docstring(node, clean=False):
            continue
        text = node.body[0]
        found.update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return found


def report(top: pathlib.Path) -> None:
    """Print the lines and files of each folder in a directory, and the sum."""
    lines: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    for path in sorted(top.rglob("*.py")):
        parts = path.relative_to(top).parts
        room = parts[0] if len(parts) > 1 else "."
        lines[room] += code_lines(path)
        files[room] += 1
    print(f"{top}: {sum(lines.values())} lines of code in {sum(files.values())} files")
    for room, count in lines.most_common():
        print(f"  {count:6} {room} ({files[room]})")


if __name__ == "__main__":
    for name in sys.argv[1:] or [ROOT / "src" / "saferun", ROOT / "tests"]:
        report(pathlib.Path(name))
