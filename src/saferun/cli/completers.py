"""Candidates for the arguments of saferun's commands; cli/completion.py asks for them.

The functions import lazily, since every command imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem

from saferun.cli import reference
from saferun.cli.options import runs_dir
from saferun.journal import reader
from saferun.profile import files
from saferun.system.printable import printable

Items: TypeAlias = list[CompletionItem[Any]]


def run_ids(context: click.Context, *_asked: object) -> Items:
    """Return the ids of the runs, newest first."""
    base = context.params.get("base") or runs_dir(context, None, None)
    return [CompletionItem(name) for name in (reader.LAST, *sorted(reader.names(base))[::-1])]


def profile_names(*_asked: object) -> Items:
    """Return the profiles, and let the shell add files."""
    return [CompletionItem("", type="file"), *profiles(os.environ)]


def profiles(environ: Mapping[str, str]) -> Items:
    """Return the profiles with their descriptions."""
    found = {one.name: files.load(one, environ).description for one in files.known(environ)}
    return [CompletionItem(name, help=printable(text)) for name, text in found.items()]


def help_words(*_asked: object) -> Items:
    """Return the words that `saferun help` explains."""
    words = reference.Reference(os.environ).words().values()
    return [CompletionItem(word) for some in words for word in some]
