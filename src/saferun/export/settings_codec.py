"""Pure: the settings of a bash twin as words, and the words as settings again.

The script that `gen-shell` makes holds its profile as shell commands, one for each setting. When it
runs it hands them over as four words each:

    where it comes from, under which conditions, the key, the value as text

The values are profile/values.py's: reading them needs no YAML parser, since the machine that the
script runs on may have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from saferun.errors import ProfileError
from saferun.named_tuple import NamedTuple
from saferun.profile.merge import Given
from saferun.profile.schema import WHEN_WORDS, Doc, Leaf, is_range
from saferun.profile.values import read_value

PROFILE, CHOSEN, MADE_FOR = "profile", "chosen", "made-for"  # keys of what is no setting
DETECTED = "detected"
SET = "--set"  # where a setting comes from that beats what the user exported
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


def _when(words: Iterable[str], script: str) -> Iterable[tuple[str, str | bool]]:
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
