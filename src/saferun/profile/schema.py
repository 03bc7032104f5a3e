"""Pure: the parts of a profile file, its JSON Schema, and how versions are compared.

The keys themselves are declared in settings.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saferun.knowledge.torchrun_options import OPTIONS
from saferun.settings import KEYS, Key, Value
from saferun.system import spelling

MAX_BYTES = 256 * 1024  # the longest text of a profile
HEAD = ("schema", "name", "description", "extends", "match")
OPEN = ("env", "torchrun")  # sections whose names are not declared keys
LEAF_KEYS = ("value", "why", "source", "when")
WHEN_RANGES = {"torch": ">=2.8,<2.10", "gpus": ">=2,<8", "attempts": ">=2"}  # each with an example
WHEN_FLAGS = ("distributed", "named")
WHEN_WORDS = (*WHEN_RANGES, *WHEN_FLAGS)
TORCHRUN_FLAGS = {o.strings[-1].lstrip("-").replace("_", "-"): o.flag for o in OPTIONS}


class Leaf(NamedTuple):
    """One value of a profile, with its reason and the condition under which it applies."""

    value: Value
    why: str = ""
    source: str = ""
    when: tuple[tuple[str, str | bool], ...] = ()
    line: int = 0


class Doc(NamedTuple):
    """One checked profile file, not yet merged with others. Keys of `leaves` are dotted."""

    path: str
    name: str
    description: str
    extends: tuple[str, ...]
    match: tuple[str, ...]  # fragments of GPU product names
    leaves: Mapping[str, Leaf]


def groups() -> set[str]:
    """Return the dotted names of all groups of keys ("hooks", "hooks.compile", …)."""
    return {key[:i] for key in KEYS for i, c in enumerate(key) if c == "."} | set(OPEN)


def children(group: str) -> list[str]:
    """Return the names that are allowed directly below `group` ("" is the top)."""
    if not group:
        return [*HEAD, *dict.fromkeys(k.split(".")[0] for k in [*KEYS, *OPEN])]
    if group == "torchrun":
        return list(TORCHRUN_FLAGS)
    below = [k[len(group) + 1 :].split(".")[0] for k in KEYS if k.startswith(group + ".")]
    return list(dict.fromkeys(below))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the fix for an unknown name: the nearest known name, or the list of all."""
    known = list(known)
    if close := spelling.nearest(name, known):
        return f"did you mean `{close}`?"
    return f"known here: {', '.join(known)}" if known else ""


# One comparison without blanks around it. A version consists of a few short numbers.
_RANGE = re.compile(r"(>=|<=|==|!=|>|<)?\s{0,8}(\d{1,9}(?:\.\d{1,9}){0,8})\Z")
_OPS = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def is_range(name: str, text: str) -> bool:
    """Return whether a text is a condition on torch's version (">=2.8,<2.10") or on a count."""
    parts = all(_RANGE.match(part.strip()) for part in text.split(","))
    return parts and (name == "torch" or (name in WHEN_RANGES and "." not in text))


def in_range(version: str, wanted: str) -> bool:
    """Return whether a version's release number satisfies every comparison.

    Local and pre-release parts do not count: "2.9.0a0+git1" and "2.9.0+cu130" are both 2.9.0.

    Args:
        version: the version, "2.9.0+cu130".
        wanted: the comparisons, ">=2.8,<2.10".
    """
    match = re.match(r"\d{1,9}(?:\.\d{1,9}){0,8}", version)
    if not match:
        return False
    have = [int(n) for n in match.group().split(".")]
    for part in wanted.split(","):
        comparison = _RANGE.match(part.strip())
        assert comparison is not None, f"{wanted!r} was checked by is_range"
        op, number = comparison.groups()
        want = [int(n) for n in number.split(".")]
        width = max(len(have), len(want))
        pad = [x + [0] * (width - len(x)) for x in (have, want)]
        if not _OPS[op or "=="](*pad):
            return False
    return True


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a profile, for editors."""
    text = {"type": "string"}
    properties: dict[str, Any] = {
        "schema": {"const": 1, "description": "The version of this format."},
        "name": {**text, "description": "Its name for `--profile`; by default the file's name."},
        "description": text,
        "extends": {
            "anyOf": [text, {"type": "array", "items": text}],
            "description": "Profiles that this one builds on; later ones override earlier ones.",
        },
        "match": _object({"gpu": {"anyOf": [text, {"type": "array", "items": text}]}}),
        "torchrun": _object(
            {name: _entry({"type": ["string", "number", "boolean"]}) for name in TORCHRUN_FLAGS}
        ),
        "env": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": _entry({"type": ["string", "number"]}),
        },
    }
    for key, spec in KEYS.items():
        *above, name = key.split(".")
        level = properties
        for group in above:
            level = level.setdefault(group, _object({}))["properties"]
        level[name] = {**_entry(_plain_schema(spec)), "description": spec.doc}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "saferun profile",
        **_object(properties),
        "required": ["schema"],
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _entry(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, either bare or with reason, source and condition."""
    text = {"type": "string"}
    versions = {"torch": {"type": ["string", "number"], "pattern": r"^[\d<>=!., ]+$"}}
    counts = {"type": ["string", "integer"], "pattern": r"^[\d<>=!, ]+$"}
    flags = {name: {"type": "boolean"} for name in WHEN_FLAGS}
    when = _object(dict.fromkeys(WHEN_RANGES, counts) | versions | flags)
    annotated = _object({"value": plain, "why": text, "source": text, "when": when})
    return {"anyOf": [plain, {**annotated, "required": ["value"]}]}


def _plain_schema(spec: Key) -> dict[str, Any]:
    if spec.kind == "choice":
        # An editor may read `off` as text or, by YAML 1.1, as false.
        also = [b for b, name in ((True, "on"), (False, "off")) if name in spec.choices]
        return {"enum": [*spec.choices, *also], "default": spec.default}
    number: dict[str, Any] = {} if spec.least is None else {"minimum": spec.least}
    if spec.kind == "range":
        items = {"type": "number", **number}
        return {"type": "array", "items": items, "minItems": 2, "maxItems": 2}
    if spec.kind == "text":
        return {"type": "string", "default": spec.default}
    if spec.kind == "texts":
        item = {"enum": list(spec.choices)} if spec.choices else {"type": "string"}
        return {"type": "array", "items": item, "default": []}
    kind = {"bool": "boolean", "int": "integer", "number": "number"}[spec.kind]
    return {"type": [kind, "null"] if spec.nullable else kind, **number, "default": spec.default}
