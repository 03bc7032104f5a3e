"""Pure: the conversion between text and the values of profile keys.

This module reads YAML scalars, `--set KEY=VALUE` and the settings of a generated script, so that a
text means the same in all three. The key determines the type, not YAML's own rules (by which `1e5`
is text and `off` is false):

    whole number   12, 1_000, 0x3
    number         12, .5, 1e5; finite
    boolean        true, false, yes, no, on, off, in any case
    choice         one of the choices; yes and no mean on and off
    null           null, ~ or the empty text, if the key is nullable
    text           as it is; null and ~ mean the empty text
    list           [a, "b", 'c'], items as above; anything in quotes is text

A placeholder of `retry.resume`, such as {checkpoint} or {--output_dir=out}, needs no quotes: YAML
would read a mapping, which no key takes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from saferun.errors import ProfileError
from saferun.profile.schema import OPEN, TORCHRUN_FLAGS, Leaf, groups, nearest
from saferun.settings import KEYS, Key, Value

_MOST = 2**63  # largest whole number; Python refuses to print one of 4,300 digits and more
NULL = ("null", "~", "")
TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*\Z"
_NUMBER = r"[-+]?(\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(e[-+]?\d+)?\Z"
# An item of a list in brackets: in double quotes (JSON's escapes), in single ones, or plain.
_PLAIN = r"""[^,\[\]{}"'\s](?:[^,\[\]{}"']*[^,\[\]{}"'\s])?"""
_ITEM = rf"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^']|'')*)'|((?:{_PLAIN})?))\s*(,|\Z)"""
# A placeholder has a name and may have a default. No mapping of a profile looks like it.
PLACEHOLDER = r"\{(--?[A-Za-z][\w.-]*|[A-Za-z_]\w*)(?:=([^{}]*))?\}"
_MOST_NESTED = 4  # defaults within defaults
_HIDING = str.maketrans("{}", "\ufdd0\ufdd1")  # code points that no text can contain
_SHOWING = str.maketrans("\ufdd0\ufdd1", "{}")
_LEADING = "!&*|>%@`#"  # characters that an unquoted YAML scalar cannot begin with


class Text(NamedTuple):
    """A scalar as it was written."""

    text: str
    quoted: bool = False  # a quoted scalar is text, whatever it looks like


class MisfitError(ValueError):
    """A text that is not a value of the key."""


# --- reading -------------------------------------------------------------------------------------


def hidden(text: str) -> str:
    """Return a text with other characters for the braces of placeholders; `shown` undoes it."""
    for _ in range(_MOST_NESTED):
        text = re.sub(PLACEHOLDER, lambda hole: hole[0].translate(_HIDING), text)
    return text


def shown(text: str) -> str:
    """Return the original of a text from `hidden`."""
    return text.translate(_SHOWING)


def coerce(spec: Key, given: Text | Sequence[Text]) -> Value:
    """Return the value of a key from a scalar or a list of scalars.

    Args:
        spec: the key.
        given: a scalar, or the scalars of a list.

    Raises:
        MisfitError: the text is not a value of this key.
    """
    if isinstance(given, Text):
        return _scalar(spec, given)
    if spec.kind == "texts":
        found = tuple(_list_item(item) for item in given)
        if spec.choices and not set(found) <= set(spec.choices):
            raise MisfitError
        return found
    if spec.kind == "range" and len(given) == 2:
        first, last = (_number(spec, item) for item in given)
        if first <= last:
            return (first, last)
    raise MisfitError


def _scalar(spec: Key, given: Text) -> Value:
    if spec.kind in ("texts", "range"):
        raise MisfitError
    low = given.text.lower()
    if spec.kind == "text":
        if not given.quoted and low[:1] == "[":  # YAML's list
            raise MisfitError
        return "" if not given.quoted and low in NULL else given.text
    if not given.quoted and low in NULL:
        if spec.nullable:
            return None
        raise MisfitError
    if spec.kind == "choice":
        choice = given.text
        if not given.quoted and low in TRUE + FALSE:
            choice = "on" if low in TRUE else "off"
        if choice in spec.choices:
            return choice
        raise MisfitError
    if spec.kind == "bool":
        if not given.quoted and low in TRUE + FALSE:
            return low in TRUE
        raise MisfitError
    return _whole(spec, given) if spec.kind == "int" else _number(spec, given)


def _whole(spec: Key, given: Text) -> int:
    if given.quoted:
        raise MisfitError
    try:
        value = int(given.text, 0)
    except ValueError:
        raise MisfitError from None
    if abs(value) > _MOST or (spec.least is not None and value < spec.least):
        raise MisfitError
    return value


def _number(spec: Key, given: Text) -> float:
    if given.quoted:
        raise MisfitError
    try:
        decimal = re.match(_NUMBER, given.text, re.ASCII | re.IGNORECASE)
        value = float(given.text) if decimal else float(int(given.text, 0))
    except (ValueError, OverflowError):
        raise MisfitError from None
    if not math.isfinite(value) or (spec.least is not None and value < spec.least):
        raise MisfitError
    return value


def _list_item(item: Text) -> str:
    """Return an item of a list of texts; an unquoted `on` or `null` is ambiguous and refused."""
    if not item.quoted and item.text.lower() in NULL + TRUE + FALSE:
        raise MisfitError
    return item.text


def split_list(text: str) -> tuple[Text, ...]:
    """Return the items of `[a, "b", 'c']`.

    Raises:
        MisfitError: the text is not such a list.
    """
    inner = hidden(text[1:-1].strip())
    if text[:1] != "[" or text[-1:] != "]":
        raise MisfitError
    items: list[Text] = []
    at = 0
    while at < len(inner):
        match = re.compile(_ITEM).match(inner, at)
        if match is None:
            raise MisfitError
        double, single, plain, _ = match.groups()
        items.append(_item(double, single, plain))
        at = match.end()
    return tuple(items)


def _item(double: str | None, single: str | None, plain: str | None) -> Text:
    if double is not None:
        try:
            return Text(shown(str(json.loads(f'"{double}"', strict=False))), quoted=True)
        except ValueError:
            raise MisfitError from None
    if single is not None:
        return Text(shown(single.replace("''", "'")), quoted=True)
    plain = (plain or "").strip()
    if not plain or plain[0] in _LEADING:
        raise MisfitError
    return Text(shown(plain))


def read_value(key: str, text: str, origin: str) -> Leaf:
    """Return the value of a profile key, read from a text.

    Args:
        key: dotted, or `env.NAME`, or `torchrun.OPTION`.
        text: the value; for `env.` and `torchrun.` it is used unchanged.
        origin: where the value was given, for messages: "--set", "run.sh".

    Raises:
        ProfileError: the key is unknown, or the text is not a value of it.
    """
    section, _, name = key.partition(".")
    if section in OPEN and name:
        return Leaf(open_value(section, name, text, origin))
    if key not in KEYS:
        raise _unknown(key, origin)
    spec = KEYS[key]
    bare = text.strip()
    try:
        if spec.kind in ("texts", "range"):
            return Leaf(coerce(spec, split_list(bare)))
        quoted = _quoted(bare)
        return Leaf(coerce(spec, quoted if quoted is not None else Text(bare)))
    except MisfitError:
        fix = nearest(bare, spec.choices) if spec.kind == "choice" and bare else expected(spec)
        what = f"`{bare}` does not fit here" if bare else "an empty value does not fit here"
        raise ProfileError(what, where=f"{origin} {key}", fix=fix) from None


def _quoted(text: str) -> Text | None:
    """Return the text within quotes; None without quotes."""
    if len(text) < 2 or text[0] not in "\"'" or text[-1] != text[0]:
        return None
    try:
        (item,) = split_list(f"[{text}]")
    except (MisfitError, ValueError):
        return None
    return item


def open_value(section: str, name: str, text: str, origin: str) -> str:
    """Return the value of a variable or of an option of torchrun.

    Args:
        section: "env" or "torchrun".
        name: the variable's name, or the option's with dashes.
        text: the value; a flag of torchrun takes a boolean.
        origin: where the value was given, for messages.

    Raises:
        ProfileError: the name is not allowed, or the value is not one of a flag.
    """
    where = f"{origin} {section}.{name}"
    if problem := open_problem(section, name):
        raise ProfileError(problem[0], where=where, fix=problem[1])
    if "\0" in text:
        fix = "leave it out"
        raise ProfileError("a NUL character cannot be in a variable", where=where, fix=fix)
    if section == "torchrun" and TORCHRUN_FLAGS[name.replace("_", "-")]:
        try:
            return flag_text(Text(text.strip()))
        except MisfitError:
            fix = "true or false"
            raise ProfileError(f"`{text}` does not fit here", where=where, fix=fix) from None
    return text


def flag_text(given: Text | Sequence[Text]) -> str:
    """Return the value of one of torchrun's flags, "true" or "false".

    Raises:
        MisfitError: the value is no boolean.
    """
    return "true" if coerce(Key("bool", False, ""), given) else "false"


def open_problem(section: str, name: str) -> tuple[str, str] | None:
    """Return why a variable or an option cannot be set, and the fix; None if it can."""
    if section == "torchrun":
        if name.replace("_", "-") not in TORCHRUN_FLAGS:
            return f"unknown torchrun option `{name}`", nearest(name, TORCHRUN_FLAGS)
    elif not re.match(_ENV_NAME, name):
        return f"`{name}` cannot be a variable's name", "letters, digits and _"
    elif name.startswith("SAFERUN_"):
        return f"`{name}` is saferun's own", "use the profile key instead"
    return None


def _unknown(key: str, origin: str) -> ProfileError:
    inside = [known for known in KEYS if known.startswith(key + ".")]
    inside += [f"{key}.NAME"] if key in OPEN else []
    if key in groups() and inside:
        fix = f"it has: {', '.join(inside)}"
        return ProfileError(f"`{key}` is a group", where=f"{origin} {key}", fix=fix)
    guess = nearest(key, KEYS)
    fix = guess if guess.startswith("did") else "`saferun profiles schema` lists them all"
    return ProfileError(f"unknown key `{key}`", where=f"{origin} {key}", fix=fix)


def expected(spec: Key) -> str:
    """Return the values that a key takes, as a clause for people."""
    text = {
        "choice": " or ".join(spec.choices),
        "bool": "true or false",
        "int": "a whole number",
        "number": "a number",
        "text": "a text, in quotes where it begins with [",
        "texts": f"a list of {', '.join(spec.choices)}"
        if spec.choices
        else 'a list of texts, such as [--resume, "auto"], with quotes where one has , [ ] { or }',
        "range": "two numbers, [first, longest]",
    }[spec.kind]
    if spec.least is not None:
        text += f" of at least {spec.least:g}"
    if spec.unit:
        text += f" ({spec.unit})"
    return f"it is {text}" + (", or null" if spec.nullable else "")


# --- writing -------------------------------------------------------------------------------------


def write_value(key: str, value: Value) -> str:
    """Return a value as a text from which `read_value` reads the same value."""
    quoted = key in KEYS and KEYS[key].kind == "text"
    if key.partition(".")[0] in OPEN or (isinstance(value, str) and not quoted):
        return str(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
