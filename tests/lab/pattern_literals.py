"""Every regular expression that the code writes out, and the method that uses it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_FUNCTIONS = ("compile", "compiled", "match", "search", "fullmatch", "finditer", "findall", "sub")
_FLAGS = {"re.M": re.M, "re.MULTILINE": re.M, "re.S": re.S, "re.I": re.I, "re.VERBOSE": re.X}


def uses(source: Path) -> Iterator[tuple[str, re.Pattern[str], str]]:
    """Yield where a pattern is used, the pattern, and `match`, `fullmatch` or `search`."""
    for path in sorted(source.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        names = dict(_constants(tree))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args and _is_use(node.func)):
                continue
            pattern = _literal(node.args[0], names)
            if pattern is not None:
                where = f"{path.relative_to(source)}:{node.lineno}"
                yield where, re.compile(pattern, _flags(node)), _method(node, tree, text)


def _is_use(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        return function.attr in (*_FUNCTIONS, "split") and ast.unparse(function.value) == "re"
    return isinstance(function, ast.Name) and function.id == "compiled"


def _constants(tree: ast.AST) -> Iterator[tuple[str, str]]:
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _literal(node.value, known)
            if text is not None:
                known[node.targets[0].id] = text
                yield node.targets[0].id, text


def _literal(node: ast.expr, names: dict[str, str]) -> str | None:
    """Return a pattern's text; a value that is filled in counts as one letter."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return node.value if isinstance(node.value, str) else node.value.decode("latin-1")
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.FormattedValue) else v for v in node.values)
        return "".join(str(_literal(part, names) or "x") for part in parts)
    return None


def _flags(node: ast.Call) -> int:
    text = ast.unparse(node)
    return sum({flag for name, flag in _FLAGS.items() if re.search(rf"{name}\b", text)})


def _method(node: ast.Call, tree: ast.AST, text: str) -> str:
    """Return how a pattern is used: a compiled one by the name that it has."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else "compiled"
    found = {name}
    if name in ("compile", "compiled"):
        found = {
            parent.attr
            for parent in ast.walk(tree)
            if isinstance(parent, ast.Attribute) and parent.value is node
        }
        for parent in ast.walk(tree):
            if isinstance(parent, ast.Assign) and parent.value is node:
                named = ast.unparse(parent.targets[0])
                found |= set(re.findall(rf"\b{named}\.(\w+)\(", text))
    return found.pop() if found in ({"match"}, {"fullmatch"}) else "search"
