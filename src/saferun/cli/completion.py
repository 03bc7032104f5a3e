"""Completion of command lines in bash, zsh and fish, by click's protocol.

`_SAFERUN_COMPLETE=bash_source saferun` prints the code for a shell, which then asks for the
candidates by `_SAFERUN_COMPLETE=bash_complete saferun`. The words of a launch are torchrun's
options and then the script, which click does not know. Nothing is started or detected here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import click
from click import shell_completion
from click.shell_completion import CompletionItem

from saferun.cli.commands import command_named
from saferun.cli.completers import profiles
from saferun.cli.gen_shell import command as gen_shell
from saferun.errors import SaferunError, UsageError
from saferun.knowledge.torchrun_options import OPTIONS
from saferun.planning.request import COMMAND_OPTIONS
from saferun.planning.torchrun.torchrun_args import COMMANDS, OWN, parse
from saferun.settings import KEYS

Items: TypeAlias = list[CompletionItem[Any]]

VARIABLE = "_SAFERUN_COMPLETE"
# The commands that take a launch's arguments, with saferun's own options in each.
_LAUNCHES: dict[str, Mapping[str, str | None]] = {
    "run": OWN,
    "plan": {**OWN, **COMMAND_OPTIONS},
    "gen-shell": {
        name: None if option.is_flag else str(option.metavar)
        for option in gen_shell.params
        if isinstance(option, click.Option)
        for name in option.opts
    },
}
_CHOICES = {
    "--nproc-per-node": ("gpu", "cpu", "auto"),
    "--nproc_per_node": ("gpu", "cpu", "auto"),
    "--rdzv-backend": ("c10d", "static", "etcd-v2"),
    "--rdzv_backend": ("c10d", "static", "etcd-v2"),
}
_FILE, _DIRECTORY = CompletionItem("", type="file"), CompletionItem("", type="dir")
_SCRIPT = CompletionItem[str]("", type="script")
_PLACES = {
    **dict.fromkeys(("--profile", "-o", "--check"), _FILE),
    **dict.fromkeys(("--run-dir", "--log-dir", "--log_dir"), _DIRECTORY),
}
_TAKES_VALUE = {string for option in OPTIONS if not option.flag for string in option.strings}
_BASH = os.path.join(os.path.dirname(__file__), "completion.bash")
# A shell may insert only such text unquoted: anybody may have named ids and profiles.
_PLAIN = re.compile(r"[\w.:@+=/-]+\Z", re.ASCII)


def answer(instruction: str) -> int:
    """Print the answer to a shell's request.

    Args:
        instruction: `SHELL_source` for the code, `SHELL_complete` for the candidates.

    Raises:
        UsageError: the instruction is neither.
    """
    shell, _, what = instruction.partition("_")
    known = shell_completion.get_completion_class(shell)
    if known is None or what not in ("source", "complete"):
        fix = "bash_source, zsh_source or fish_source"
        raise UsageError(f"cannot complete for {instruction!r}", where=VARIABLE, fix=fix)
    asked = known(click.Command("saferun"), {}, "saferun", VARIABLE)
    if what == "source":
        if shell == "bash":
            with open(_BASH, encoding="utf-8") as file:
                asked.source_template = file.read()  # type: ignore[misc]  # of this object only
        click.echo(asked.source())
        return 0
    for item in candidates(*asked.get_completion_args(), environ=os.environ):
        if shell == "zsh":
            item.value = item.value or "_"  # click's code for zsh drops empty lines
        click.echo(asked.format_completion(item))
    return 0


def candidates(args: Sequence[str], incomplete: str, *, environ: Mapping[str, str]) -> Items:
    """Return the candidates for the word that is being written.

    Args:
        args: the words before it; bash splits `--a=b` into three.
        incomplete: the beginning of the word.
        environ: variables that say where runs and profiles are.
    """
    words: list[str] = []
    for word in [*args, incomplete]:
        joined = words and (word == "=" or words[-1].endswith("="))
        words[-1:] = [words[-1] + word] if joined else [*words[-1:], word]
    written = words.pop()
    shown = incomplete.removeprefix("=")
    cut = len(written) - len(shown)  # the part that the shell already has
    try:
        found = _of_line(words, written, environ)
    except (SaferunError, OSError):
        return []
    plain = (item for item in found if item.type == "plain" and _PLAIN.match(item.value))
    fitting = [item for item in plain if item.value.startswith(written)]
    shortened = [CompletionItem(item.value[cut:], help=item.help) for item in fitting]
    known = "COMP_SCRIPTS" in environ
    places = [
        CompletionItem(shown, type=item.type if known or item.type != "script" else "file")
        for item in found
        if item.type != "plain"
    ]
    return [*shortened, *places]


def _of_line(words: Sequence[str], written: str, environ: Mapping[str, str]) -> Items:
    first = words[0] if words else ""
    if first in _LAUNCHES:
        return _of_launch(words[1:], written, _LAUNCHES[first], environ)
    if first in COMMANDS:
        asked = shell_completion.ShellComplete(command_named(first), {}, first, VARIABLE)
        return asked.get_completions(list(words[1:]), written)
    commands = [] if words or written.startswith("-") else _items(COMMANDS)
    return [*commands, *_of_launch(words, written, OWN, environ)]


def _of_launch(
    words: Sequence[str], written: str, own: Mapping[str, str | None], environ: Mapping[str, str]
) -> Items:
    """Return the candidates before and after SCRIPT.

    Args:
        words: the words before the one that is written.
        written: the beginning of that word.
        own: saferun's own options, as in OWN.
        environ: variables that say where profiles are.
    """
    if _has_script(words, own):
        return [_FILE]
    last = words[-1] if words else ""
    if last in _TAKES_VALUE or own.get(last):
        return _values(last, written, environ)
    option, equals, value = written.partition("=")
    if equals and option.startswith("--"):
        values = (item for item in _values(option, value, environ) if item.type == "plain")
        place = [_PLACES[option]] if option in _PLACES else []
        return [*place, *_items(f"{option}={item.value}" for item in values)]
    if not written.startswith("-"):
        other = {"--no-python", "--no_python", "-m", "--module"}  # a module's name, as a file's
        return [_FILE if other.intersection(words) else _SCRIPT]
    spelled = [next((s for s in o.strings if s.startswith(written)), "") for o in OPTIONS]
    return _items([*own, *filter(None, spelled)])


def _has_script(words: Sequence[str], own: Mapping[str, str | None]) -> bool:
    try:
        return parse(words, own=own).line.script is not None
    except SaferunError:
        return False  # an option of saferun lacks its value


def _values(option: str, written: str, environ: Mapping[str, str]) -> Items:
    place = [_PLACES[option]] if option in _PLACES else []
    if option == "--profile":
        return [*place, *profiles(environ)]
    if option == "--set":
        return _settings(written)
    return [*place, *_items(_CHOICES.get(option, ()))]


def _settings(written: str) -> Items:
    """Return `KEY=` for each key, or the choices of a key that is written already."""
    key, equals, _ = written.partition("=")
    if not equals:
        return _items(f"{key}=" for key in KEYS)
    spec = KEYS.get(key)
    choices = () if spec is None else ("true", "false") if spec.kind == "bool" else spec.choices
    return _items(f"{key}={choice}" for choice in choices)


def _items(values: Iterable[str]) -> Items:
    return [CompletionItem(value) for value in values]
