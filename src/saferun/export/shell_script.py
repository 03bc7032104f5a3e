"""Pure: plans and settings as shell text.

`exports` returns the output of `saferun env`, and `render` the whole script of `gen-shell`. Every
value passes through `quote`: values are data, never shell code.
"""

from __future__ import annotations

import ast
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from saferun import __version__
from saferun.export import settings_codec
from saferun.export.settings_codec import ScriptSettings
from saferun.knowledge.variable_names import LISTS
from saferun.model import LaunchPlan
from saferun.planning.inputs import starts_python
from saferun.planning.own_variables import OF_ATTEMPT
from saferun.profile.merge import Given
from saferun.profile.schema import Doc, Leaf
from saferun.profile.values import write_value

WIDTH = 100
KIT_WIDTH = 1000  # characters of a line of packed data
INDENT = "#     "  # precedes the command in the header
_PACKED = "#: "
_PLACE = re.compile(r"^#@ (\w+)\n", re.MULTILINE)
# The output of `quote`: $'…', '…', "'" or characters without a meaning in a shell.
_PIECE = (
    r"""\$'((?:[ -&(-\[\]-~]|\\(?:[ntr\\']|x[0-9a-f]{2}))*)'|'([^']*)'|"(')"|([\w@%+=:,./-]+)"""
)
_PIECES = re.compile(_PIECE, re.ASCII)
_WORD = re.compile(rf"\s*((?:{_PIECE})+)", re.ASCII)
_JOB = 'job torchrun "$@"\n'


def exports(plan: LaunchPlan) -> str:
    """Return sorted `export` lines for `eval`, which set no shell option and run nothing.

    Variables of a single attempt under saferun are left out.
    """
    return "".join(
        f"export {name}={shlex.quote(setting.value)}\n"
        for name, setting in sorted(plan.env.items())
        if name not in OF_ATTEMPT
    )


# --- quoting -------------------------------------------------------------------------------------


def quote(text: str) -> str:
    """Return one bash word, on one line, that expands to exactly this text.

    >>> quote("plain"), quote("it's"), quote("two" + chr(10) + "lines")
    ('plain', '\\'it\\'"\\'"\\'s\\'', "$'two\\\\nlines'")
    """
    if text.isprintable():
        return shlex.quote(text)
    # Python escapes bytes as bash does; it uses single quotes if there is a double quote.
    raw = text.encode("utf-8", "surrogateescape")
    return "$'" + repr(b'"' + raw)[3:]


def unquoted(line: str) -> list[str] | None:
    """Return the words of a line from `quote`; None for any other line."""
    words, at = [], 0
    while at < len(line.rstrip()):
        match = _WORD.match(line, at)
        if match is None:
            return None
        words.append("".join(_piece(*found) for found in _PIECES.findall(match[1])))
        at = match.end()
    return words


def _piece(escaped: str, single: str, double: str, bare: str) -> str:
    if not escaped:
        return single or double or bare
    raw: bytes = ast.literal_eval(f"b'{escaped}'")
    return raw.decode("utf-8", "surrogateescape")


def comment(text: str) -> str:
    """Return text as comment lines; nothing in it can end the comment."""
    lines = textwrap.wrap(
        _printable(text), WIDTH - 2, break_long_words=False, break_on_hyphens=False
    )
    return "".join(_comment_line(line) for line in lines)


def one_line(text: str) -> str:
    """Return text as one line, with single blanks between its words."""
    return " ".join(_printable(text).split())


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _comment_line(text: str) -> str:
    """Return one comment line that is not one of the script's headings (`# --- The job ---`)."""
    return f"# {' ' * text.startswith('---')}{text}\n"


def _lines(kit: tuple[str, str]) -> Iterator[str]:
    program, files = kit
    yield program
    # textwrap would search for words in it, which took half the time of gen-shell.
    yield from (files[start : start + KIT_WIDTH] for start in range(0, len(files), KIT_WIDTH))


# --- the script ----------------------------------------------------------------------------------


def render(
    script_settings: ScriptSettings,
    args: Sequence[str],
    *,
    command: Sequence[str],
    template: str,
    kit: tuple[str, str],
    whole: bool,
) -> str:
    """Return the whole script.

    Args:
        script_settings: the settings.
        args: torchrun's arguments; empty if the script takes them at run time.
        command: `saferun gen-shell …`, which makes this script.
        template: the hand-written part, shell/run.sh.
        kit: the program that unpacks, and the files, each in base85 (bundle.pack).
        whole: `args` contain the job's script; otherwise it is given at run time.
    """
    parts = {
        "header": _header(script_settings, command, whole),
        "settings": "".join(_settings(script_settings)).lstrip("\n"),
        "job": _job_comment(script_settings, whole),
        "kit": "".join(f"{_PACKED}{line}\n" for line in _lines(kit)),
    }
    head, job, tail = template.partition(_JOB)
    assert job, "the template starts the job"
    quoted = "".join(f" {quote(argument)}" for argument in args)
    text = f'{head}job torchrun{quoted} "$@"\n{tail}'
    return _PLACE.sub(lambda match: parts[match[1]], text)


def made_by(text: str) -> tuple[str, list[str]] | None:
    """Return the version and the command in a script's header; None for any other file."""
    head = text[: 1 << 16]
    version = re.search(r"^# Made by saferun (\S+) with$", head, re.MULTILINE)
    line = re.search(rf"^{INDENT}(saferun gen-shell.*)$", head, re.MULTILINE)
    command = unquoted(line[1]) if line else None
    return (version[1], command) if version and command else None


def packed(text: str) -> str:
    """Return the packed bundle in a script, in base85."""
    return "".join(line[len(_PACKED) :] for line in text.splitlines() if line.startswith(_PACKED))


def without_bundle(text: str) -> str:
    """Return the readable part of a script."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith(_PACKED))


def _header(script_settings: ScriptSettings, command: Sequence[str], whole: bool) -> str:
    usage = "[SCRIPT'S ARGUMENTS]..." if whole else "[TORCHRUN OPTIONS]... SCRIPT [ARGUMENTS]..."
    return (
        comment(
            f"A training job under profile {script_settings.profile}, whose environment fits the "
            "GPU. After a failure that may be temporary the job starts again, after one that a "
            "setting avoids with that setting; after any other it stops and says why."
        )
        + f"#\n{INDENT}bash THIS-FILE {usage}\n#\n# Made by saferun {__version__} with\n#\n"
        + f"{INDENT}{' '.join(map(quote, command))}\n#\n"
        + comment(
            "which makes the same file again; `saferun gen-shell --check THIS-FILE` tells whether "
            "it still would. Change the settings as you like. It needs bash, python3 (3.10 or "
            "later) and torch, and no saferun: what it needs of that travels at its end. With "
            "--plain it is a short one to commit, which does less."
        )
    )


def _job_comment(script_settings: ScriptSettings, whole: bool) -> str:
    how = "What this script is given "
    how += "follows the script's own arguments." if whole else "are torchrun's arguments."
    if starts_python(script_settings.chain, script_settings.sets):
        how += " Under `launcher: python` they start plain python, without torchrun."
    return comment(how)


def _settings(script_settings: ScriptSettings) -> Iterator[str]:
    yield f"profile {quote(script_settings.profile)} {quote(script_settings.chosen)}\n"
    if script_settings.made_for:
        yield f"made_for {' '.join(map(quote, script_settings.made_for))}\n"
    for place, doc in enumerate(script_settings.chain):
        leaves = _counting(doc, script_settings.chain[place + 1 :], script_settings.sets)
        if leaves:
            yield f"\nfrom {quote(doc.path)}\n"
        for key, leaf in leaves.items():
            yield "\n" + comment(leaf.why) + _source(leaf.source) + _line(key, leaf, "default")
    if script_settings.sets:
        yield f"\nfrom {settings_codec.SET}\n\n"
        yield from (_line(given.key, given.leaf, "always") for given in script_settings.sets)


def _counting(doc: Doc, later: Sequence[Doc], sets: Sequence[Given]) -> Mapping[str, Leaf]:
    """Return the settings of a file that no later setting replaces unconditionally."""
    over = {key for other in later for key, leaf in other.leaves.items() if not leaf.when}
    over |= {given.key for given in sets}
    return {k: v for k, v in doc.leaves.items() if k not in over or k.partition(".")[2] in LISTS}


def _source(text: str) -> str:
    return "".join(_comment_line(one) for one in one_line(text).split("; ") if one)


def _line(key: str, leaf: Leaf, manner: str) -> str:
    section, _, name = key.partition(".")
    value = quote(write_value(key, leaf.value))
    whens = "".join(f"when {quote(word)} " for word in settings_codec.conditions(leaf))
    if section == "env":
        return f"{whens}export_{manner} {name} {value}\n"
    if section == "torchrun":
        return f"{whens}torchrun_default {name} {value}\n"
    return f"{whens}setting {key} {value}\n"
