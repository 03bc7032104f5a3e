"""A module without what only its readers and type checkers need, as a generated script packs it.

Comments and docstrings go, and the annotations of functions and variables. All else keeps its
meaning and the number of its line, which tracebacks show. The fields of classes keep their
annotations: they are read at run time.
"""

from __future__ import annotations

import ast
import re
from typing import TypeGuard

# Code with its strings, up to a comment; lines inside of a long string do not match as a whole.
_BEFORE_COMMENT = re.compile(r"""((?:[^"'#]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)#.*""")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


def bare(text: str) -> str:
    """Return a module's text without them; of a docstring `""` is left, which may be a whole body.

    Raises:
        SyntaxError: the text is no module.
    """
    lines, within = [], False
    for line in _Module(text).without_cuts().split("\n"):
        odd = line.count('"""') % 2 == 1
        code = None if within or odd else _BEFORE_COMMENT.fullmatch(line)
        lines.append(code[1].rstrip() if code else line)
        within ^= odd
    return "\n".join(lines)


def _is_text(node: ast.stmt) -> bool:
    value = isinstance(node, ast.Expr) and node.value
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_for_checkers(node: ast.AST) -> TypeGuard[ast.If]:
    test = isinstance(node, ast.If) and not node.orelse and node.test
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


class _Module:
    """A module and the places that are cut out of it, in bytes, with what stands there instead."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._module = ast.parse(text)
        self._starts = [0]  # of the lines
        for line in self._data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._cuts: list[tuple[int, int, bytes]] = []

    def without_cuts(self) -> str:
        fields: set[ast.stmt] = set()  # the class comes before what is in it
        for node in ast.walk(self._module):
            if isinstance(node, ast.ClassDef):
                fields.update(node.body)
            if isinstance(node, ast.arg) and node.annotation:
                self._cut(self._start(node) + len(node.arg.encode()), node.annotation)
            elif isinstance(node, _FUNCTIONS) and node.returns:
                self._cut(self._data.rindex(b" ->", 0, self._start(node.returns)), node.returns)
            elif isinstance(node, ast.AnnAssign) and node.value and node not in fields:
                self._cut(self._end(node.target), node.annotation)
            elif _is_for_checkers(node):
                self._cut(self._start(node), node)
            if isinstance(node, _DOCUMENTED) and node.body and _is_text(node.body[0]):
                self._cut(self._start(node.body[0]), node.body[0], '""')  # it may be all of a body
        parts, at = [], 0
        for start, end, instead in sorted(self._cuts):
            if start >= at:  # else it lies within the one before
                parts += [self._data[at:start], instead]
                at = end
        return b"".join([*parts, self._data[at:]]).decode()

    def _cut(self, start: int, last: ast.expr | ast.stmt, instead: str = "") -> None:
        end = self._end(last)
        line_end = "\\\n" if isinstance(last, ast.expr) else "\n"  # a statement goes on below
        lines = line_end * self._data.count(b"\n", start, end)
        self._cuts.append((start, end, (instead + lines).encode()))

    def _start(self, node: ast.expr | ast.arg | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
