"""Pure: YAML nodes as values of a profile key, whatever type YAML gives them."""

from __future__ import annotations

from typing import Any

from saferun.profile.schema import Key


def kind(node: Any) -> str:
    """Return what a node is, in words for people."""
    name = type(node).__name__
    if name != "ScalarNode":
        return {"MappingNode": "a mapping", "SequenceNode": "a list"}.get(name, "nothing")
    words = {"bool": "a boolean", "int": "a number", "float": "a number", "null": "nothing"}
    return words.get(node.tag.rsplit(":", 1)[-1], "the text")


def scalar(node: Any) -> Any:
    """Return a scalar as YAML's core types; dates and other tags stay text."""
    tag, text = node.tag.rsplit(":", 1)[-1], node.value
    try:
        if tag == "int":
            return int(text.replace("_", ""), 0)
        if tag == "float":
            return float(text.replace("_", ""))
    except ValueError:
        return text
    if tag == "bool":
        return text.lower() in ("yes", "true", "on")
    return None if tag == "null" else text


def coerce(spec: Key, node: Any) -> tuple[bool, Any]:
    """Return (fits, value) of a node against a key."""
    if type(node).__name__ == "SequenceNode":
        return _coerce_list(spec, node)
    if type(node).__name__ != "ScalarNode" or spec.kind in ("texts", "range"):
        return False, None
    value = scalar(node)
    if value is None:
        return spec.nullable, None
    if spec.kind == "choice":
        if isinstance(value, bool):
            value = "on" if value else "off"
        return value in spec.choices, value
    if spec.kind == "bool":
        return isinstance(value, bool), value
    return _coerce_number(spec, value)


def _coerce_number(spec: Key, value: Any) -> tuple[bool, Any]:
    kinds = (int,) if spec.kind == "int" else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        return False, None
    if spec.kind in ("number", "range"):
        value = float(value)
        if value != value or value in (float("inf"), float("-inf")):
            return False, None
    return (spec.least is None or value >= spec.least), value


def _coerce_list(spec: Key, node: Any) -> tuple[bool, Any]:
    if any(type(n).__name__ != "ScalarNode" for n in node.value):
        return False, None
    if spec.kind == "texts":
        bad = any(n.style is None and n.tag.endswith((":bool", ":null")) for n in node.value)
        return not bad, tuple(n.value for n in node.value)
    if spec.kind == "range":
        pairs = [_coerce_number(spec, scalar(n)) for n in node.value]
        values = tuple(v for ok, v in pairs if ok)
        return len(values) == len(pairs) == 2 and values[0] <= values[1], values
    return False, None


def expected(spec: Key) -> str:
    """Return what a key takes, in words for people."""
    words = {
        "choice": " or ".join(spec.choices),
        "bool": "true or false",
        "int": "a whole number",
        "number": "a number",
        "texts": "a list of texts",
        "range": "two numbers, [first, longest]",
    }[spec.kind]
    if spec.least is not None:
        words += f" of at least {spec.least:g}"
    if spec.unit:
        words += f" ({spec.unit})"
    return f"it is {words}" + (", or null" if spec.nullable else "")
