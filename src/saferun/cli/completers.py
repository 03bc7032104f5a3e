"""Candidates for the arguments of saferun's commands; cli/completion.py asks for them.

Nothing is imported until then: the commands import this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    import click
    from click.shell_completion import CompletionItem

    Items: TypeAlias = list[CompletionItem[Any]]


def run_ids(context: click.Context, *_asked: object) -> Items:
    """Return the ids of the runs, newest first."""
    from click.shell_completion import CompletionItem

    from saferun.journal import reader
    from saferun.planning import inputs
    from saferun.system import paths

    base = paths.runs_dir(context.params.get("run_dir"), os.environ, inputs.working_directory())
    return [CompletionItem(name) for name in (reader.LAST, *sorted(reader.names(base))[::-1])]


def profile_names(*_asked: object) -> Items:
    """Return the profiles, and files."""
    from click.shell_completion import CompletionItem

    return [CompletionItem("", type="file"), *profiles(os.environ)]


def profiles(environ: Mapping[str, str]) -> Items:
    """Return the profiles with their descriptions."""
    from click.shell_completion import CompletionItem

    from saferun.profile import files
    from saferun.system.printable import printable

    found = {one.name: files.load(one, environ).description for one in files.known(environ)}
    return [CompletionItem(name, help=printable(text)) for name, text in found.items()]


def help_words(*_asked: object) -> Items:
    """Return the words that `saferun help` explains."""
    from click.shell_completion import CompletionItem

    from saferun.cli import reference

    words = reference.Reference(os.environ).words().values()
    return [CompletionItem(word) for some in words for word in some]
