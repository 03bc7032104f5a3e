"""`saferun help`: explain a word that saferun prints or takes; without a word, the front page."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Mapping

import click

from saferun.cli import reference
from saferun.cli.completers import help_words
from saferun.cli.options import HELP, echo
from saferun.cli.usage import HELP as USAGE
from saferun.errors import UsageError
from saferun.system.spelling import nearest

_WIDTH = 96
_MOST = {"variables": 12, "options": 12}  # most names shown, of those that contain a word


@click.command(context_settings={**HELP, "ignore_unknown_options": True})
@click.argument(
    "words",
    nargs=-1,
    metavar="[KIND | VARIABLE | HOOK | KEY | COMMAND | OPTION | STATUS | WORD]",
    shell_complete=help_words,
)
@click.option("--list", "listed", is_flag=True, help="List all words.")
def command(words: tuple[str, ...], listed: bool) -> int:
    """Explain a word that saferun prints or takes; several words are one name, if there is one."""
    known = reference.Reference(os.environ)
    if listed:
        for what, names in known.words().items():
            echo(f"{what}:\n{_wrapped(', '.join(names))}")
        return 0
    if not words:
        echo(USAGE.rstrip("\n"))
        return 0
    words = words[1:] if words[0] == "saferun" and len(words) > 1 else words
    word = " ".join(words)
    asked = [word] if len(words) == 1 or known.entries(word) else list(words)
    echo("\n\n".join(explained(known, one) for one in asked))
    return 0


def explained(known: reference.Reference, word: str) -> str:
    """Return what is known about a word, and about names that contain it.

    Raises:
        UsageError: no name or explanation contains the word.
    """
    found, others = known.entries(word), known.similar(word)
    names = [name for some in others.values() for name in some]
    if not found and len(names) == 1:
        return explained(known, names[0])
    if found and others:
        parts = ["Others that contain it:", *_named(others)]
    elif others:
        parts = [f"{word} is not a name, but a part of these:", *_named(others)]
    elif not found and (mentioned := known.mentions(word)):
        parts = [f"{word} is not a name; the text about these has it:", *_named(mentioned)]
    else:
        parts = []
    if not found and not parts:
        known_words = itertools.chain.from_iterable(known.words().values())
        close = nearest(word, known_words, 0.75) if len(word) < 200 else ""
        fix = f"did you mean `{close}`?" if close else "saferun help --list shows all words"
        raise UsageError(f"nothing is known about {word!r}", fix=fix)
    return "\n\n".join([*map(as_text, found), *(["\n".join(parts)] if parts else [])])


def _named(others: Mapping[str, list[str]]) -> list[str]:
    """Return a line for each sort of names; long lists of names are cut."""
    lines = []
    for what, names in others.items():
        most = _MOST.get(what, len(names))
        more = f" and {len(names) - most} more" if len(names) > most else ""
        lines.append(_wrapped(f"{what}: {', '.join(names[:most])}{more}"))
    return lines


def as_text(entry: reference.Entry) -> str:
    """Return an entry as a terminal shows it."""
    return "\n".join([f"{entry.word}: {entry.what}", *map(_wrapped, entry.paragraphs)])


def _wrapped(text: str) -> str:
    return textwrap.fill(
        text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
