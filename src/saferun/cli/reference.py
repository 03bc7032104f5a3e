"""What saferun knows about a word that it prints or takes.

A word may be a kind of failure, a mitigation, a variable, a hook, a profile key, a profile, a
command, an option, an exit status, a signal or an entry of the glossary. The text comes from the
data alone, so it is the same in a terminal and in the documents.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import click

from saferun.audit import effects, variable_index
from saferun.cli import usage
from saferun.cli.commands import command_named
from saferun.diagnosis import signatures
from saferun.diagnosis.signatures import Kind
from saferun.knowledge import loader
from saferun.knowledge.torchrun_options import OPTIONS
from saferun.planning import mitigation_catalog
from saferun.planning.torchrun.torchrun_args import COMMANDS
from saferun.profile import files as profiles
from saferun.profile.schema import Doc
from saferun.settings import KEYS, Key

# What each command does, and its options.
_Commands: TypeAlias = dict[str, tuple[str, Sequence[click.Option]]]
VERDICTS = {
    "retry": "tries again: it may be temporary",
    "mitigate": "tries again with a setting changed",
    "stop-user": "stops: code, data, arguments or packages need a change",
    "stop-hardware": "stops: the machine needs attention",
    "unknown": "does not try again, unless retry.unknown_after_s says so",
}
VARIABLES = {
    **{name: f"as the option {option}: {text}" for option, text, name in usage.OPTIONS},
    **{text.partition("=")[0]: text for text in (usage.DISABLE, usage.VERDICT_FILE)},
}
# Sections and groups of keys: "retry.resume" and "retry", for "retry.resume.args".
SECTIONS = dict.fromkeys(
    ".".join(parts[:depth])
    for parts in (key.split(".") for key in KEYS)
    for depth in range(1, len(parts))
    if parts[0] != "hooks" or depth == 1
)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known about one word: a heading and paragraphs."""

    word: str
    what: str  # "kind of failure (memory)"
    paragraphs: tuple[str, ...]


class Reference:
    """All words; the files that explain them are read once.

    Args:
        environ: names the user's profiles.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._mitigations = mitigation_catalog.load()
        self._effects = effects.load()
        self._profiles: dict[str, Doc] = {}
        for one in profiles.known(environ):  # a user's own comes first and hides a shipped one
            if one.name not in self._profiles:
                self._profiles[one.name] = profiles.load(one, environ)
        data = loader.load("words.yaml")
        self._own = {**data["variables"], **VARIABLES}
        kinds, commands = signatures.load().kinds, _all_commands()
        hooks = {name: _hook(name, does) for name, does in data["hooks"].items()}
        keys = {key: hooks.get(key.removeprefix("hooks.")) or self._key(key) for key in KEYS}
        glossary = [
            (name, text)  # a line of the glossary may explain several words
            for names, text in data["words"].items()
            for name in names.split(", ")
        ]
        self._all: dict[str, dict[str, Entry]] = {
            "kinds of failure": {name: _kind(kind) for name, kind in kinds.items()},
            "mitigations": {n: _mitigation(m, kinds) for n, m in self._mitigations.items()},
            "hooks": hooks,
            "profile keys": keys,
            "variables": {name: self._listed(name) for name in sorted(self._variables())},
            "sections of profile keys": {name: _section(name) for name in SECTIONS},
            "profiles": {name: _profile(doc) for name, doc in self._profiles.items()},
            "verdicts": {name: _verdict(name) for name in VERDICTS},
            "commands": {name: _command(name, *about) for name, about in commands.items()},
            "options": {
                name: Entry(name, "option", tuple(text))
                for name, text in _all_options(commands).items()
            },
            "exit statuses": {name: _status(name, text) for name, text in data["statuses"].items()},
            "words": {n: Entry(n, "word of saferun's", (_sentence(text),)) for n, text in glossary},
        }
        self._named = {f"hooks.{name}": [name] for name in hooks}  # keyed by the result of `_plain`
        for name in itertools.chain.from_iterable(self._all.values()):
            self._named.setdefault(_plain(name), []).append(name)

    def entries(self, word: str) -> list[Entry]:
        """Return all entries with this name; [] if there is none.

        Case, leading dashes, and the choice of blank, dash or underscore between words do not
        matter; the name that is spelt so comes first.
        """
        plain = _plain(word)
        named = self._named.get(plain) or self._named.get(re.sub("-?s$", "", plain), [])
        names = dict.fromkeys((word, *named, word.lower(), word.upper()))
        return list(dict.fromkeys(entry for name in names for entry in self._called(name)))

    def _called(self, name: str) -> Iterator[Entry]:
        """Yield the entries with exactly this name, also unlisted variables, statuses, signals."""
        yield from (section[name] for section in self._all.values() if name in section)
        if name not in self._all["variables"] and (variable := self._variable(name)):
            yield variable
        if name not in self._all["exit statuses"] and _ended_by(name):
            yield _status(name, "")
        yield from _signal(name)

    def similar(self, word: str) -> dict[str, list[str]]:
        """Return the other names that contain a word, by the kind of name.

        Args:
            word: the word as the user writes it; a name is found if one of its parts begins with
                it.
        """
        plain = _plain(word)
        inside = re.compile(rf"(?:^|[-.]){re.escape(plain)}")
        return self._where(lambda n, _: bool(inside.search(_plain(n))) and _plain(n) != plain)

    def mentions(self, word: str) -> dict[str, list[str]]:
        """Return the names whose explanation contains a word, by kind; variables are left out."""
        has = re.compile(rf"(?i)(?<![\w-]){re.escape(word)}(?![\w-])")
        found = self._where(lambda _, entry: bool(has.search(" ".join(entry.paragraphs))))
        return {what: names for what, names in found.items() if what != "variables"}

    def _where(self, wanted: Callable[[str, Entry], bool]) -> dict[str, list[str]]:
        found = {
            what: [name for name, entry in section.items() if wanted(name, entry)]
            for what, section in self._all.items()
        }
        return {what: names for what, names in found.items() if names}

    def words(self) -> dict[str, list[str]]:
        """Return all words that have an entry, by kind."""
        return {what: list(section) for what, section in self._all.items()}

    # --- what profiles and variables have to do with it --------------------------------------

    def _key(self, name: str) -> Entry:
        return Entry(name, "profile key", (_setting(name), *self._set_by(name)))

    def _variables(self) -> set[str]:
        """Return the variables that are listed."""
        keys = (key for doc in self._profiles.values() for key in doc.leaves)
        by_profiles = {key[4:] for key in keys if key.startswith("env.")}
        by_mitigations = {name for one in self._mitigations.values() for name in one.env}
        return {*self._effects, *self._own, *by_profiles, *by_mitigations}

    def _listed(self, name: str) -> Entry:
        found = self._variable(name)
        assert found is not None, name
        return found

    def _variable(self, name: str) -> Entry | None:
        text = loader.variables_text()
        effect = self._effects.get(name)
        readers = variable_index.look_up(text, name) if name.isupper() else None
        by = [*self._set_by(f"env.{name}"), *self._set_by_mitigations(name)]
        own = self._own.get(name)
        if effect is None and readers is None and not by and not own:
            return None
        found = [_sentence(own)] if own else []
        found += _effect(effect) if effect else []
        found += [_read_by(reader) for reader in readers or ()]
        if readers == ():
            found.append("No release that was looked at reads it.")
        return Entry(name, "variable", (*found, *by, *_links([effect.source] if effect else [])))

    def _set_by(self, key: str) -> list[str]:
        found = [(n, doc.leaves[key]) for n, doc in self._profiles.items() if key in doc.leaves]
        return [
            f"Set by profile {name} to {leaf.value}" + (f": {leaf.why}" if leaf.why else "")
            for name, leaf in found
        ]

    def _set_by_mitigations(self, name: str) -> list[str]:
        found = self._mitigations.values()
        setting = [one.name for one in found if name in one.env or name in one.computed]
        return [f"Set by mitigations: {', '.join(setting)}."] if setting else []


# --- one word ----------------------------------------------------------------------------------


def _kind(kind: Kind) -> Entry:
    does = VERDICTS[kind.verdict]
    if kind.mitigations:
        does += f" ({', then '.join(kind.mitigations)})"
    text = [kind.explanation, f"saferun {does}.", kind.advice]
    return Entry(kind.name, f"kind of failure ({kind.group})", (*text, *_links(kind.references)))


def _mitigation(one: mitigation_catalog.Mitigation, kinds: Mapping[str, Kind]) -> Entry:
    of = [kind.name for kind in kinds.values() if one.name in kind.mitigations]
    text = [f"Sets {mitigation_catalog.sets(one)}.", f"Why: {one.why}.", f"Cost: {one.cost}."]
    text += [f"After: {', '.join(of)}."] if of else []
    text += [f"Not together with {', '.join(one.excludes)}."] if one.excludes else []
    return Entry(one.name, "mitigation", (*text, *_links([one.source])))


def _hook(hook: str, does: str) -> Entry:
    own = [key for key in KEYS if key == f"hooks.{hook}" or key.startswith(f"hooks.{hook}.")]
    return Entry(hook, "hook", (_sentence(does), *map(_setting, own)))


def _section(name: str) -> Entry:
    own = [key for key in KEYS if key.startswith(f"{name}.")]
    return Entry(name, "profile keys", tuple(map(_setting, own)))


def _profile(doc: Doc) -> Entry:
    about = _sentence(doc.description or "a profile")
    return Entry(doc.name, "profile", (about, f"`saferun profiles show {doc.name}` has all of it."))


def _verdict(name: str) -> Entry:
    return Entry(name, "verdict on a failure", (f"saferun {VERDICTS[name]}.",))


def _command(name: str, does: str, options: Sequence[click.Option]) -> Entry:
    lines = (f"{', '.join(one.opts)} {one.help}" for one in options)
    text = [_sentence(does), *(" ".join(line.split()) for line in lines)]
    return Entry(name, "command", (*text, f"`saferun {name} --help` has all of it."))


def _status(name: str, text: str) -> Entry:
    whole = "; ".join(filter(None, (text, _ended_by(name))))
    return Entry(name, "exit status", (_sentence(whole),))


def _ended_by(status: str) -> str:
    """Return the signal that an exit status stands for; "" if none."""
    number = int(status) - 128 if status.isdigit() and len(status) < 4 else 0
    if number not in {one.value for one in signal.Signals}:
        return ""
    return f"128 + {number}: {signal.Signals(number).name} ended the process"


def _signal(name: str) -> Iterator[Entry]:
    known = {one.name: one for one in signal.Signals}
    one = known.get(name if name.startswith("SIG") else f"SIG{name}")
    if one is not None and name.isupper():
        text = (
            f"{_sentence(signal.strsignal(one) or one.name)} A process that it ends has the status "
            f"{128 + one} for a shell and {-one} for torchrun and Python."
        )
        yield Entry(one.name, f"signal {one.value}", (text,))


def _all_commands() -> _Commands:
    """Return each command, "runs watch" too: what it does, and its options."""
    found: _Commands = {"run": (COMMANDS["run"], ())}
    for name, does in COMMANDS.items():
        if name != "run":
            command = command_named(name)
            found[name] = (does, _own_options(command))
            for path, one in _below(name, command):
                found[path] = (one.get_short_help_str(200), _own_options(one))
    return found


def _below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    for name, one in command.commands.items() if isinstance(command, click.Group) else ():
        yield f"{path} {name}", one
        yield from _below(f"{path} {name}", one)


def _own_options(command: click.Command) -> list[click.Option]:
    options = (one for one in command.params if isinstance(one, click.Option))
    return [one for one in options if one.help and "--help" not in one.opts]


def _all_options(commands: _Commands) -> dict[str, list[str]]:
    """Return each option with its effect and its commands."""
    found = {option.split()[0]: [_sentence(text)] for option, text, _ in usage.OPTIONS}
    for command, (_, options) in commands.items():
        for one in options:
            text = f"Of `saferun {command}`: {_sentence(one.help or '')}"
            for name in one.opts:
                found.setdefault(name, []).append(text)
    for option in OPTIONS:
        variable = f"; {option.env} is its variable" if option.env else ""
        text = f"Of torchrun, and the same here: `torchrun --help` explains it{variable}."
        for string in option.strings:
            found.setdefault(string, []).append(text)
    return found


def _plain(name: str) -> str:
    """Return a name in the form in which names are looked up, whatever its spelling."""
    return re.sub(r"[\s_-]+", "-", name.strip().removeprefix("saferun ").lower()).strip("-")


def _effect(effect: effects.Effect) -> Iterator[str]:
    if effect.does:
        yield _sentence(effect.does)
    if effect.reader:
        yield f"Read by {effect.reader}."
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
