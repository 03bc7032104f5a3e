"""Pure: the parser of profiles; errors give file, line and the nearest key of settings.py.

It has a decoder of its own: the strict decoders that were tried (msgspec, pydantic) cost 17-45 ms
to import, give no line numbers or nearest keys, and cannot see that YAML has turned `off` into
False (benchmarks/imports.py has the times). It walks the node tree and constructs nothing, so that
tags create no objects and aliases are not expanded. A launch does not import this file: it reads
the cached result, and a generated script may run without PyYAML.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import yaml

from saferun.errors import ProfileError
from saferun.profile.schema import (
    HEAD,
    LEAF_KEYS,
    MAX_BYTES,
    OPEN,
    TORCHRUN_FLAGS,
    WHEN_FLAGS,
    WHEN_RANGES,
    WHEN_WORDS,
    Doc,
    Leaf,
    children,
    groups,
    is_range,
    nearest,
)
from saferun.profile.values import MisfitError, Text, coerce, expected, flag_text, open_problem
from saferun.profile.yaml_nodes import MAX_NODES, compose, kind, scalar, texts
from saferun.settings import KEYS, Value

MAX_DEPTH = 8


def parse(text: str, path: str) -> Doc:
    """Read one profile.

    Args:
        text: the YAML.
        path: the file's path, for error messages and the origin of values.

    Raises:
        ProfileError: the first error, with file, line and fix, and the number of further ones
            (`check` returns all).
    """
    doc, errors = check(text, path)
    if errors:
        first = errors[0]
        if len(errors) > 1:
            more = f"{len(errors) - 1} more: saferun profiles check {path}"
            first = ProfileError(
                first.what, where=first.where, fix="; ".join(filter(None, (first.fix, more)))
            )
        raise first
    assert doc is not None
    return doc


def check(text: str, path: str) -> tuple[Doc | None, list[ProfileError]]:
    """Return one profile and all errors in it; the Doc is None if there are any."""
    reader = Reader(path)
    doc = reader.read(text)
    return (None if reader.errors else doc), reader.errors


class Reader:
    """Reads a YAML node tree by the table of keys and collects errors."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.errors: list[ProfileError] = []
        self.leaves: dict[str, Leaf] = {}
        self.head: dict[str, Any] = {}
        self._seen = 0

    def error(self, what: str, node: Any = None, fix: str = "", key: str = "") -> None:
        """Record an error at a node.

        Args:
            what: the message.
            node: the YAML node; None if the error concerns the whole file.
            fix: what the user should write.
            key: the key that contains it.
        """
        line = f", line {node.start_mark.line + 1}" if node is not None else ""
        inside = f", `{key}`" if key else ""
        self.errors.append(ProfileError(what, where=f"{self.path}{line}{inside}", fix=fix))

    def read(self, text: str) -> Doc | None:
        """Return the profile of a whole file, as far as it can be read."""
        root = self._compose(text)
        if root is None:
            return None
        self._group("", root)
        if "schema" not in self.head and not self.errors:
            self.error("the profile has no `schema`", root, "add `schema: 1`")
        name = self.head.get("name") or self.path.rsplit("/", 1)[-1].rsplit(".", 1)[0]
        return Doc(
            self.path,
            name,
            self.head.get("description", ""),
            tuple(self.head.get("extends", ())),
            tuple(self.head.get("match", ())),
            self.leaves,
        )

    def _compose(self, text: str) -> Any:
        if len(text) > MAX_BYTES:
            self.error(
                f"the file has {len(text):,} characters", fix=f"a profile has at most {MAX_BYTES:,}"
            )
            return None
        try:
            root = compose(text)
        except yaml.YAMLError as error:
            self._yaml_error(error)
            return None
        except (RecursionError, ValueError) as error:
            self.error(f"not readable as YAML ({type(error).__name__})", fix="")
            return None
        if root is None:
            self.error("the file is empty", fix="write at least `schema: 1` and one value")
        return root

    def _yaml_error(self, error: Any) -> None:
        mark = getattr(error, "problem_mark", None)
        where = f"{self.path}, line {mark.line + 1}" if mark else self.path
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        self.errors.append(
            ProfileError(f"not readable as YAML: {problem}", where=where, fix="fix the YAML")
        )

    def _pairs(self, node: Any, key: str) -> list[tuple[str, Any, Any]]:
        """Return the (name, key node, value node) of a mapping; duplicates are errors."""
        if not isinstance(node, yaml.MappingNode):
            names = ", ".join(children(key)) if key not in OPEN else "names and values"
            self.error(f"{kind(node)} where a mapping belongs", node, f"it has: {names}", key)
            return []
        found: dict[str, tuple[str, Any, Any]] = {}
        for key_node, value_node in node.value:
            self._seen += 1
            name = key_node.value if isinstance(key_node, yaml.ScalarNode) else ""
            if not name:
                self.error("a key that is not a word", key_node, key=key)
            elif name in found:
                first = found[name][1].start_mark.line + 1
                self.error(f"duplicate key `{name}`", key_node, f"first given on line {first}", key)
            elif self._seen > MAX_NODES or key.count(".") > MAX_DEPTH:
                self.error("too many or too deeply nested entries", key_node)
                return []
            else:
                found[name] = (name, key_node, value_node)
        return list(found.values())

    def _head(self, name: str, node: Any) -> None:
        value = self._plain(node)
        if name == "schema" and value != 1:
            self.error(f"schema {value!r} is not known", node, "this saferun reads `schema: 1`")
        elif name in ("name", "description") and not isinstance(value, str):
            self.error(f"{kind(node)} where text belongs", node, "put it in quotes", name)
        elif name == "name" and not re.match(r"[\w.+-]+\Z", value):
            self.error(f"`{value}` cannot be a profile's name", node, "letters, digits, -", name)
        elif name == "extends":
            value = [value] if isinstance(value, str) else value
            if not _texts(value):
                self.error("`extends` is a list of profile names", node, "extends: [cuda]")
                value = ()
        elif name == "match":
            value = self._match(node)
        self.head[name] = value

    def _match(self, node: Any) -> tuple[str, ...]:
        found: tuple[str, ...] = ()
        for name, key_node, value_node in self._pairs(node, "match"):
            value = self._plain(value_node)
            value = [value] if isinstance(value, str) else value
            if name != "gpu":
                self.error(f"unknown key `{name}`", key_node, nearest(name, ["gpu"]), "match")
            elif not _texts(value) or not all(v.strip() for v in value):
                self.error("`match: gpu:` is a list of product names", value_node, "gpu: [H100]")
            else:
                found = tuple(value)
        return found

    def _group(self, group: str, node: Any) -> None:
        """Read a mapping of keys and groups of keys; "" is the whole profile."""
        for name, key_node, value_node in self._pairs(node, group):
            key = f"{group}.{name}" if group else name
            if key in HEAD:
                self._head(key, value_node)
            elif key in KEYS:
                self._entry(key, value_node)
            elif key in OPEN:
                self._open_section(key, value_node)
            elif key in groups():
                self._group(key, value_node)
            else:
                self.error(f"unknown key `{name}`", key_node, nearest(name, children(group)), group)

    def _open_section(self, section: str, node: Any) -> None:
        for name, key_node, value_node in self._pairs(node, section):
            if problem := open_problem(section, name):
                self.error(problem[0], key_node, problem[1])
            else:
                key = name.replace("_", "-") if section == "torchrun" else name
                self._entry(f"{section}.{key}", value_node)

    def _entry(self, key: str, node: Any) -> None:
        """Store a value, either bare or in the annotated form {value, why, source, when}."""
        with contextlib.suppress(MisfitError):  # the error has been recorded
            value_node, notes = self._annotations(key, node)
            self.leaves[key] = Leaf(
                self._value(key, value_node), *notes, line=node.start_mark.line + 1
            )

    def _value(self, key: str, node: Any) -> Value:
        section, _, name = key.partition(".")
        if section == "env":
            return self._text(node, key)
        if section == "torchrun" and not TORCHRUN_FLAGS[name]:
            return self._text(node, key)
        try:
            if section == "torchrun":  # a quoted boolean is a flag, too
                scalar_node = isinstance(node, yaml.ScalarNode)
                return flag_text(Text(node.value) if scalar_node else texts(node))
            return coerce(KEYS[key], texts(node))
        except MisfitError:
            given = node.value if isinstance(node, yaml.ScalarNode) else ""
            fix = "true or false" if section == "torchrun" else expected(KEYS[key])
            if section != "torchrun" and KEYS[key].kind == "choice" and given:
                fix = nearest(given, KEYS[key].choices)
            shown = f" `{given}`" if given else ""
            self.error(f"{kind(node)}{shown} does not fit here", node, fix, key)
            raise

    def _text(self, node: Any, key: str) -> str:
        """Return a text as it was typed; one that YAML reads as a boolean or null is an error."""
        what = fix = ""
        if not isinstance(node, yaml.ScalarNode):
            what, fix = f"{kind(node)} where text belongs", "write one value"
        elif node.style is None and node.tag.endswith((":bool", ":null")):
            typed = node.value or "nothing"
            what = f"{kind(node)} where text belongs"
            fix = f'YAML reads {typed} as {kind(node)}: put it in quotes, "{node.value}"'
        elif "\0" in node.value:
            what, fix = "a NUL character cannot be in a variable", "leave it out"
        elif any("\ud800" <= c <= "\udfff" for c in node.value):
            what, fix = "half of a character (a lone surrogate)", "write it whole"
        if what:
            self.error(what, node, fix, key)
            raise MisfitError
        return str(node.value)

    def _annotations(
        self, key: str, node: Any
    ) -> tuple[Any, tuple[str, str, tuple[tuple[str, str | bool], ...]]]:
        """Split a node into its value node and (why, source, when)."""
        if not isinstance(node, yaml.MappingNode):
            return node, ("", "", ())
        found: dict[str, Any] = {}
        for name, key_node, value_node in self._pairs(node, key):
            if name not in LEAF_KEYS:
                self.error(f"unknown key `{name}`", key_node, nearest(name, LEAF_KEYS), key)
            found[name] = value_node
        if "value" not in found:
            self.error("an entry without `value`", node, "write {value: …, why: …}", key)
            raise MisfitError
        when = self._when(found["when"], key) if "when" in found else ()
        why, source = (self._note(found.get(name), key) for name in ("why", "source"))
        return found["value"], (why, source, when)

    def _note(self, node: Any, key: str) -> str:
        with contextlib.suppress(MisfitError):  # recorded already; the value may be wrong, too
            return " ".join(self._text(node, key).split()) if node else ""
        return ""

    def _when(self, node: Any, key: str) -> tuple[tuple[str, str | bool], ...]:
        found: list[tuple[str, str | bool]] = []
        for name, key_node, value_node in self._pairs(node, f"{key}.when"):
            value = self._plain(value_node)
            if name not in WHEN_WORDS:
                self.error(f"unknown condition `{name}`", key_node, nearest(name, WHEN_WORDS), key)
            elif name in WHEN_FLAGS and isinstance(value, bool):
                found.append((name, value))
            elif isinstance(value, (str, int)) and is_range(name, str(value)):
                found.append((name, str(value)))
            else:
                example = WHEN_RANGES.get(name)
                fix = f'a range such as "{example}"' if example else "true or false"
                self.error(f"`{value}` is not a condition on `{name}`", value_node, fix, key)
        return tuple(found)

    def _plain(self, node: Any) -> Any:
        """Return a scalar or a list of scalars as a Python value; None for anything else."""
        if isinstance(node, yaml.SequenceNode):
            scalars = [n for n in node.value if isinstance(n, yaml.ScalarNode)]
            return [scalar(n) for n in scalars] if len(scalars) == len(node.value) else None
        return scalar(node) if isinstance(node, yaml.ScalarNode) else None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)
