"""Pure: the settings that a training script makes itself, whatever the environment says.

Only constants in the source are seen, not computed values. Nothing is run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_CONFIG = "torch._inductor.config"


class Calls(NamedTuple):
    """The settings that a script makes, with line numbers."""

    assigned: Mapping[str, tuple[str | None, int]]  # variable -> (value if constant, line)
    config: Mapping[str, int]  # inductor's config name, or key of torch.compile(options=) -> line
    modes: Mapping[str, int]  # mode of torch.compile -> line
    called: Mapping[str, int]  # "torch.set_num_threads" -> line


def read_script(source: str) -> Calls:
    """Return the settings that a script makes; none if it is not Python or is nested too deeply."""
    try:
        return _calls(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Calls({}, {}, {}, {})


def _calls(tree: ast.AST) -> Calls:
    nodes = list(ast.walk(tree))
    aliases = {alias for node in nodes for alias in _aliases(node)}
    return Calls(
        assigned={name: where for node in nodes for name, where in _assigned(node)},
        config={name: line for node in nodes for name, line in _configured(node, aliases)},
        modes={mode: line for node in nodes for mode, line in _modes(node)},
        called={ast.unparse(n.func): n.lineno for n in nodes if isinstance(n, ast.Call)},
    )


def _aliases(node: ast.AST) -> Iterator[str]:
    """Yield the names by which a module refers to inductor's config."""
    if isinstance(node, ast.Import):
        yield from (a.asname for a in node.names if a.name == _CONFIG and a.asname)
    elif isinstance(node, ast.ImportFrom) and node.module == "torch._inductor":
        yield from (a.asname or a.name for a in node.names if a.name == "config")


def _assigned(node: ast.AST) -> Iterator[tuple[str, tuple[str | None, int]]]:
    """Yield the variables that a statement sets in os.environ, which override exported ones."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                name = _text(target.slice)
                if name is not None:
                    yield name, (_text(node.value), node.lineno)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("environ.update"):
        pairs = [(k.arg, k.value) for k in node.keywords]
        for literal in (argument for argument in node.args if isinstance(argument, ast.Dict)):
            pairs += [(_text(k), v) for k, v in zip(literal.keys, literal.values, strict=True)]
        yield from ((key, (_text(value), node.lineno)) for key, value in pairs if key)


def _is_environ(node: ast.AST) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _configured(node: ast.AST, aliases: set[str]) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            dotted = ast.unparse(target)
            for name in (_CONFIG, *aliases):
                if dotted.startswith(name + "."):
                    yield dotted[len(name) + 1 :], node.lineno
    elif isinstance(node, ast.Call) and _is_compile(node):
        for keyword in node.keywords:
            if keyword.arg == "options" and isinstance(keyword.value, ast.Dict):
                keys = map(_text, keyword.value.keys)
                yield from ((key, node.lineno) for key in keys if key)


def _modes(node: ast.AST) -> Iterator[tuple[str, int]]:
    if isinstance(node, ast.Call) and _is_compile(node):
        for keyword in node.keywords:
            mode = _text(keyword.value) if keyword.arg == "mode" else None
            if mode is not None:
                yield mode, node.lineno


def _is_compile(node: ast.Call) -> bool:
    """Return whether a call is torch.compile(…), model.compile(…) or partial(torch.compile, …)."""
    partial = ast.unparse(node.func).endswith("partial")
    return any(ast.unparse(n).endswith(".compile") for n in [node.func, *node.args[: int(partial)]])


def _text(node: ast.AST | None) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return None
