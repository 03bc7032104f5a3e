"""Pure: the settings of a bash twin as words, and the words as settings again.

The script that `gen-shell` makes holds its profile as shell commands, one for each setting. When it
runs it hands them over as four words each:

    where it comes from, under which conditions, the key, the value as text

`write_value` and `read_value` are each other's inverse for what a profile can hold. Reading needs
no YAML parser, since the machine of the twin may have none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.errors import ProfileError
from saferun.profile.merge import Given
from saferun.profile.schema import (
    KEYS,
    OPEN,
    TORCHRUN_FLAGS,
    WHEN_WORDS,
    Doc,
    Leaf,
    is_range,
    nearest,
)
from saferun.profile.values import coerce, expected

PROFILE, CHOSEN, MADE_FOR = "profile", "chosen", "made-for"  # keys of what is no setting
DETECTED = "detected"
SET = "--set"  # where a setting comes from that beats what the user exported
_ENV_NAME = r"[A-Za-z_][A-Za-z0-9_]*\Z"
_CONDITION = r"(torch|gpus|distributed)\s*(.+)\Z"


class Sheet(NamedTuple):
    """The settings of one twin, before anything is known of the machine that it runs on."""

    profile: str
    chosen: str  # who chose the profile: "--profile", "./saferun.yaml", "detected"
    made_for: tuple[str, ...]  # fragments of GPU product names; none: any machine
    chain: tuple[Doc, ...]
    sets: tuple[Given, ...] = ()

    @property
    def named(self) -> bool:
        """Whether somebody named the profile; a detected one never changes torchrun's arguments."""
        return self.chosen != DETECTED


class ScalarNode(NamedTuple):
    """What profile/values.py knows a value by; the class's name counts there."""

    tag: str
    value: str
    style: str | None = None


class SequenceNode(NamedTuple):
    """A list of them."""

    value: tuple[ScalarNode, ...]


# --- one value -----------------------------------------------------------------------------------


def write_value(key: str, value: Any) -> str:
    """Return a value of a profile key as text."""
    if key.partition(".")[0] in OPEN or isinstance(value, str):
        return str(value)
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def read_value(key: str, text: str, origin: str) -> Leaf:
    """Return what a text says for a profile key.

    Args:
        key: dotted, or `env.NAME`, or `torchrun.OPTION`.
        text: the value; numbers, booleans and lists as YAML writes them on one line.
        origin: where it stands, for messages.

    Raises:
        ProfileError: an unknown key, or a value that does not fit it.
    """
    section, _, name = key.partition(".")
    if section in OPEN and name:
        _check_open(section, name, text, origin)
        return Leaf(text)
    if key not in KEYS:
        raise ProfileError(f"unknown key `{key}`", where=origin, fix=nearest(key, KEYS))
    fits, value = coerce(KEYS[key], _node(text, listed=KEYS[key].kind in ("texts", "range")))
    if not fits:
        fix = expected(KEYS[key])
        raise ProfileError(f"`{text}` does not fit here", where=f"{origin}, `{key}`", fix=fix)
    return Leaf(value)


def _check_open(section: str, name: str, text: str, origin: str) -> None:
    if section == "torchrun":
        if name not in TORCHRUN_FLAGS:
            fix = nearest(name, TORCHRUN_FLAGS)
            raise ProfileError(f"unknown torchrun option `{name}`", where=origin, fix=fix)
        if TORCHRUN_FLAGS[name] and text not in ("true", "false"):
            fix = "true or false"
            raise ProfileError(f"`{text}` does not fit `{name}`", where=origin, fix=fix)
    elif not re.match(_ENV_NAME, name):
        fix = "letters, digits and _"
        raise ProfileError(f"`{name}` cannot be a variable's name", where=origin, fix=fix)
    elif name.startswith("SAFERUN_"):
        fix = "use the profile key it stands for"
        raise ProfileError(f"`{name}` is saferun's own", where=origin, fix=fix)


def _node(text: str, *, listed: bool) -> Any:
    text = text.strip()
    if not (listed and text[:1] == "[" and text[-1:] == "]"):
        return _scalar(text)
    try:
        items = [item if isinstance(item, str) else json.dumps(item) for item in json.loads(text)]
        texts = [isinstance(item, str) for item in json.loads(text)]
    except ValueError:
        items = [item.strip() for item in text[1:-1].split(",") if item.strip()]
        texts = [False] * len(items)
    pairs = zip(items, texts)  # noqa: B905 (equally long)
    return SequenceNode(tuple(ScalarNode("str", i, '"') if t else _scalar(i) for i, t in pairs))


_TAGS = (
    ("int", r"[-+]?\d+\Z"),
    ("float", r"[-+]?(\d+\.\d*|\.\d+|\d+)([eE][-+]?\d+)?\Z"),
    ("bool", r"(true|false|yes|no|on|off)\Z"),
    ("null", r"(null|~|)\Z"),
)


def _scalar(text: str) -> ScalarNode:
    low = text.lower()
    tag = next((tag for tag, form in _TAGS if re.match(form, low)), "str")
    return ScalarNode(f"tag:yaml.org,2002:{tag}", text)


# --- the whole sheet -----------------------------------------------------------------------------


def conditions(leaf: Leaf) -> tuple[str, ...]:
    """Return a setting's conditions as words without blanks: "torch>=2.8,<2.10"."""
    found = []
    for name, wanted in leaf.when:
        text = "".join(str(wanted).lower().split())
        found.append(f"{name}={text}" if text[:1] not in "<>=!" else f"{name}{text}")
    return tuple(found)


def read(words: Sequence[str], script: str) -> Sheet:
    """Return the sheet that a twin handed over.

    Args:
        words: four for each setting.
        script: the twin's name, for messages.

    Raises:
        ProfileError: something in it was edited to what cannot be.
    """
    told: dict[str, list[str]] = {PROFILE: [], CHOSEN: [], MADE_FOR: []}
    docs: list[tuple[str, dict[str, Leaf]]] = []
    sets: list[Given] = []
    for at in range(0, len(words) - 3, 4):
        origin, when, key, text = words[at : at + 4]
        if key in told:
            told[key].append(text)
        elif origin == SET:
            sets.append(Given(key, read_value(key, text, script), SET))
        else:
            leaf = read_value(key, text, script)._replace(when=tuple(_when(when.split(), script)))
            _add(docs, origin, key, leaf)
    profile = (told[PROFILE] or ["none"])[-1]
    chosen = (told[CHOSEN] or [script])[-1]
    made_for = tuple(told[MADE_FOR])
    return Sheet(profile, chosen, made_for, tuple(_chain(docs, profile, made_for)), tuple(sets))


def _add(docs: list[tuple[str, dict[str, Leaf]]], origin: str, key: str, leaf: Leaf) -> None:
    """Put a setting into its file's; one that comes again is a later file's, as it were.

    So that each counts where its own condition holds.
    """
    if not docs or docs[-1][0] != origin or key in docs[-1][1]:
        docs.append((origin, {}))
    docs[-1][1][key] = leaf


def _chain(
    docs: Iterable[tuple[str, Mapping[str, Leaf]]], profile: str, made_for: tuple[str, ...]
) -> list[Doc]:
    chain = [Doc(path, _stem(path), "", (), (), leaves) for path, leaves in docs]
    last = Doc(profile, profile, "", (), made_for, {})
    return [*chain, last]


def _stem(path: str) -> str:
    return path.rpartition("/")[2].rpartition(".")[0]


def _when(words: Iterable[str], script: str) -> Iterable[tuple[str, Any]]:
    for word in words:
        match = re.match(_CONDITION, word)
        name, wanted = match.groups() if match else (word, "")
        if name == "distributed" and wanted in ("=true", "=false"):
            yield name, wanted == "=true"
        elif name in ("torch", "gpus") and is_range(wanted := _comparison(wanted)):
            yield name, wanted
        else:
            fix = f"known: {', '.join(WHEN_WORDS)}, such as torch>=2.8"
            raise ProfileError(f"`{word}` is no condition", where=script, fix=fix)


def _comparison(text: str) -> str:
    return text[1:] if text.startswith("=") and not text.startswith("==") else text
