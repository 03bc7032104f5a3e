"""Remove from a module what only readers and type checkers need, for a generated script.

Comments, docstrings and the annotations of functions and variables are removed. All other code
keeps its meaning and its line numbers, which tracebacks show. The fields of classes keep their
annotations, which are read at run time.
"""

from __future__ import annotations

import ast
import re
from typing import TypeGuard

# Code with its strings, up to a comment; a line inside a long string does not match as a whole.
_BEFORE_COMMENT = re.compile(r"""((?:[^"'#]|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')*)#.*""")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)


def bare(text: str) -> str:
    """Return a module's bare text; a docstring becomes `""`, since it may be a whole body.

    Raises:
        SyntaxError: the text is not a module.
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
    """A module and the places to cut from it, in bytes, each with its replacement."""

    def __init__(self, text: str) -> None:
        self._data = text.encode()
        self._module = ast.parse(text)
        self._starts = [0]  # offset of each line
        for line in self._data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._cuts: list[tuple[int, int, bytes]] = []

    def without_cuts(self) -> str:
        fields: set[ast.stmt] = set()  # a class comes before its content
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
                self._cut(self._start(node.body[0]), node.body[0], '""')  # it may be the whole body
        parts, at = [], 0
        for start, end, instead in sorted(self._cuts):
            if start >= at:  # otherwise it lies within the previous one
                parts += [self._data[at:start], instead]
                at = end
        return b"".join([*parts, self._data[at:]]).decode()

    def _cut(self, start: int, last: ast.expr | ast.stmt, instead: str = "") -> None:
        end = self._end(last)
        line_end = "\\\n" if isinstance(last, ast.expr) else "\n"  # a statement continues below
        lines = line_end * self._data.count(b"\n", start, end)
        self._cuts.append((start, end, (instead + lines).encode()))

    def _start(self, node: ast.expr | ast.arg | ast.stmt) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt) -> int:
        return self._starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
