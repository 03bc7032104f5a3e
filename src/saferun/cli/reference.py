"""What saferun knows of a word: a kind of failure, a mitigation, a variable, a hook, a profile key,
a profile, a command.

The text is made of the data alone, so it is the same in a terminal and in the documents.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

from saferun.audit import effects, variable_index
from saferun.cli.front_page import HELP
from saferun.diagnosis import signatures
from saferun.knowledge import loader
from saferun.named_tuple import NamedTuple
from saferun.planning import mitigation_catalog
from saferun.profile import files as profiles
from saferun.profile.schema import HOOKS, KEYS, Key, Leaf

VERDICTS = {
    "retry": "tries again: it can pass",
    "mitigate": "tries again with a setting changed",
    "stop-user": "stops: code, data, arguments or packages need a change",
    "stop-hardware": "stops: the machine needs attention",
    "unknown": "does not try again, unless retry.unknown_after_s says so",
}
# Commands and saferun's own variables, from the front page.
COMMANDS = dict(re.findall(r"^  ([a-z]\S+) +(.+)$", HELP, re.M))
VARIABLES = {
    **{
        name: f"as the option {option}: {text}"
        for option, text, name in re.findall(r"^  (--.+?)  +(.+?)  +\[(\w+)]$", HELP, re.M)
    },
    **{text.partition("=")[0]: text for text in re.findall(r"^(SAFERUN_.+)\.$", HELP, re.M)},
}
# "retry" of "retry.resume.args", and "retry.resume"
SECTIONS = dict.fromkeys(
    ".".join(parts[:depth])
    for parts in (key.split(".") for key in KEYS)
    for depth in range(1, len(parts))
    if parts[0] != "hooks" or depth == 1
)


class Entry(NamedTuple):
    """What is known of one word, as a head and paragraphs."""

    word: str
    what: str  # "kind of failure (memory)"
    paragraphs: tuple[str, ...]


class Reference:
    """All words; each file that tells of them is read once.

    Args:
        environ: names the user's cache and profiles.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def entries(self, word: str) -> list[Entry]:
        """Return all that goes by this name; empty where nothing does.

        Variables are found in capitals, too.
        """
        makers: list[Callable[[str], Entry | None]]
        makers = [self._kind, self._mitigation, _hook, self._key, self._variable]
        makers += [_section, self._profile, _verdict, _front]
        names = dict.fromkeys((word, word.lower(), word.upper()))
        found = (maker(name) for name in names for maker in makers)
        return [entry for entry in found if entry is not None]

    def words(self) -> dict[str, list[str]]:
        """Return all words that have an entry, by what they are."""
        return {
            "kinds of failure": list(self._kinds),
            "mitigations": list(self._mitigations),
            "hooks": list(HOOKS),
            "profile keys": list(KEYS),
            "variables": sorted({*self._effects, *self._set_somewhere()}),
            "sections of profile keys": list(SECTIONS),
            "profiles": list(self._profiles),
            "verdicts": list(VERDICTS),
            "commands, and variables of saferun's own": [*COMMANDS, *VARIABLES],
        }

    # --- the data ----------------------------------------------------------------------------

    @cached_property
    def _kinds(self) -> Mapping[str, signatures.Kind]:
        return signatures.load(self._environ).kinds

    @cached_property
    def _mitigations(self) -> Mapping[str, mitigation_catalog.Mitigation]:
        return mitigation_catalog.load(self._environ)

    @cached_property
    def _effects(self) -> Mapping[str, effects.Effect]:
        return effects.load(self._environ)

    @cached_property
    def _profiles(self) -> dict[str, Mapping[str, Leaf]]:
        known = profiles.known(self._environ)
        return {one.name: profiles.load(one, self._environ).leaves for one in known}

    # --- one word ----------------------------------------------------------------------------

    def _kind(self, name: str) -> Entry | None:
        kind = self._kinds.get(name)
        if kind is None:
            return None
        does = VERDICTS[kind.verdict]
        if kind.mitigations:
            does += f" ({', then '.join(kind.mitigations)})"
        text = [kind.explanation, f"saferun {does}.", kind.advice]
        return Entry(name, f"kind of failure ({kind.group})", (*text, *_links(kind.references)))

    def _mitigation(self, name: str) -> Entry | None:
        one = self._mitigations.get(name)
        if one is None:
            return None
        of = [kind.name for kind in self._kinds.values() if name in kind.mitigations]
        text = [f"Sets {mitigation_catalog.sets(one)}.", f"Why: {one.why}.", f"Cost: {one.cost}."]
        text += [f"After: {', '.join(of)}."] if of else []
        text += [f"Not together with {', '.join(one.excludes)}."] if one.excludes else []
        return Entry(name, "mitigation", (*text, *_links([one.source])))

    def _key(self, name: str) -> Entry | None:
        if name not in KEYS or name.removeprefix("hooks.") in HOOKS:
            return None
        return Entry(name, "profile key", (_setting(name), *self._set_by(name)))

    def _profile(self, name: str) -> Entry | None:
        if name not in self._profiles:
            return None
        found = next(one for one in profiles.known(self._environ) if one.name == name)
        about = _sentence(profiles.load(found, self._environ).description or "a profile")
        return Entry(name, "profile", (about, f"`saferun profiles show {name}` has all of it."))

    def _variable(self, name: str) -> Entry | None:
        text = loader.variables_text()
        effect = self._effects.get(name)
        readers = variable_index.look_up(text, name) if name.isupper() else None
        by = [*self._set_by(f"env.{name}"), *self._set_by_mitigations(name)]
        if effect is None and readers is None and not by:
            return None
        found = list(_effect(effect)) if effect else []
        found += [_read_by(reader) for reader in readers or ()]
        if readers == ():
            found.append("No release that was looked at reads it.")
        return Entry(name, "variable", (*found, *by, *_links([effect.source] if effect else [])))

    def _set_by(self, key: str) -> list[str]:
        found = [(name, leaves[key]) for name, leaves in self._profiles.items() if key in leaves]
        return [
            f"Set by profile {name} to {leaf.value}" + (f": {leaf.why}" if leaf.why else "")
            for name, leaf in found
        ]

    def _set_by_mitigations(self, name: str) -> list[str]:
        found = self._mitigations.values()
        setting = [one.name for one in found if name in one.env or name in one.computed]
        return [f"Set by mitigations: {', '.join(setting)}."] if setting else []

    def _set_somewhere(self) -> set[str]:
        keys = (key for leaves in self._profiles.values() for key in leaves)
        by_profiles = {key[4:] for key in keys if key.startswith("env.")}
        return by_profiles | {name for one in self._mitigations.values() for name in one.env}


def _hook(name: str) -> Entry | None:
    hook = name.removeprefix("hooks.")
    if hook not in HOOKS:
        return None
    own = [key for key in KEYS if key == f"hooks.{hook}" or key.startswith(f"hooks.{hook}.")]
    return Entry(hook, "hook", (_sentence(HOOKS[hook]), *map(_setting, own)))


def _section(name: str) -> Entry | None:
    own = [key for key in KEYS if key.startswith(f"{name}.")] if name in SECTIONS else []
    return Entry(name, "profile keys", tuple(map(_setting, own))) if own else None


def _verdict(name: str) -> Entry | None:
    if name not in VERDICTS:
        return None
    return Entry(name, "verdict on a failure", (f"saferun {VERDICTS[name]}.",))


def _front(name: str) -> Entry | None:
    if name in VARIABLES:
        return Entry(name, "variable of saferun's own", (_sentence(VARIABLES[name]),))
    if name in COMMANDS:
        options = f"`saferun {name} --help` has its options."
        return Entry(name, "command", (_sentence(COMMANDS[name]), options))
    return None


def _effect(effect: effects.Effect) -> Iterator[str]:
    if effect.does:
        yield _sentence(effect.does)
    if effect.dead:
        yield _sentence(f"has no effect: {_fixed(effect.dead, effect.fix)}")
    if effect.newer:
        yield f"Its newer name is {effect.newer}."
    if effect.cost:
        yield f"Cost: {effect.cost}."
    if effect.overridden:
        yield f"Overruled: {effect.overridden}."
    for value, why in effect.idle.items():
        yield f"The value {value} changes nothing: {why}."
    for value, remark in effect.warn.items():
        what = "any value" if value == "*" else f"the value {value}"
        yield _sentence(f"{what}: {_fixed(remark.what, remark.fix)}")


def _fixed(what: str, fix: str) -> str:
    return f"{what}; fix: {fix}" if fix else what


def _read_by(reader: variable_index.Reader) -> str:
    newest = variable_index.releases(loader.variables_text(), reader.library)[-1]
    last = reader.releases[-1]
    until = "on" if last == newest else f"to {last}"
    return f"Read by {reader.library} from {reader.releases[0]} {until}."


def _setting(key: str) -> str:
    return f"{key}: {choices(KEYS[key])}. {KEYS[key].doc}"


def choices(key: Key) -> str:
    """Return the values of a profile key, the default first."""
    return ", ".join(key.choices) or f"{json.dumps(key.default)} {key.unit}".strip()


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _links(links: Iterable[str]) -> list[str]:
    return [f"See {link}" for link in links if link]
