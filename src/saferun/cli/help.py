"""`saferun help`: what a word means that saferun prints or takes; the front page without one."""

from __future__ import annotations

import os
import textwrap

import click

from saferun.cli import reference
from saferun.cli.completers import help_words
from saferun.cli.front_page import HELP as FRONT
from saferun.cli.options import HELP, echo
from saferun.errors import UsageError
from saferun.profile.schema import nearest

_WIDTH = 96


@click.command(context_settings=HELP)
@click.argument(
    "word",
    required=False,
    metavar="[KIND | VARIABLE | MITIGATION | HOOK | KEY]",
    shell_complete=help_words,
)
@click.option("--list", "listed", is_flag=True, help="List all words.")
def command(word: str | None, listed: bool) -> int:
    """Explain a kind of failure, a variable, a mitigation, a hook or a profile key."""
    known = reference.Reference(os.environ)
    if listed:
        for what, words in known.words().items():
            echo(f"{what}:\n{_wrapped(', '.join(words))}")
        return 0
    if word is None:
        echo(FRONT.rstrip("\n"))
        return 0
    found = known.entries(word)
    if not found:
        names = [name for names in known.words().values() for name in names]
        close = nearest(word, names) if len(word) < 200 else ""
        fix = close if close.startswith("did") else "saferun help --list shows all words"
        raise UsageError(f"nothing is known of {word!r}", fix=fix)
    echo("\n\n".join(as_text(entry) for entry in found))
    return 0


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
