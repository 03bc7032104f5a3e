"""Pure: where a job's checkpoints are, and the arguments that make its script resume from one.

Placeholders in both keys of `retry.resume`:

    {--output_dir}        the value that the script's arguments give to this option
    {--output_dir=out}    the same, with the default `out`
    {NANOCHAT_BASE_DIR}   an exported variable; a default is written as above
    {checkpoint}, {step}  in `args`: the checkpoint's path, and the number in its name

In an option's name dashes and underscores are equal, as with HfArgumentParser and tyro. Options of
Hydra and OmegaConf, which have no dashes before them (`output_dir=x`), are found as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from saferun.model import Checkpoint
from saferun.profile.values import PLACEHOLDER
from saferun.settings import ResumePolicy

_HOLE = re.compile(PLACEHOLDER, re.ASCII)
_SPECIAL = re.compile(r"([*?[])")  # special characters of glob(7)
_NUMBER = re.compile(r"-(\d|\.\d|$)")
_BRACES, _HIDDEN = "{}", "\x01\x02"  # stand for the braces in a value, which are no placeholders


class UnknownError(ValueError):
    """A placeholder has no value; the message is its name."""


def pattern(
    policy: ResumePolicy, script_args: Sequence[str], environ: Mapping[str, str]
) -> str | None:
    """Return the pattern of glob(7) that finds the job's checkpoints.

    Args:
        policy: `retry.resume`.
        script_args: the script's arguments as the user wrote them.
        environ: the variables that the user exported.

    Raises:
        UnknownError: neither an argument nor a variable gives a placeholder its value.
    """

    def known(name: str) -> str | None:
        value = _value(name, script_args, environ)
        return None if value is None else _SPECIAL.sub(r"[\1]", value)

    return _filled(policy.checkpoints, known) or None


def arguments(
    script_args: Sequence[str],
    policy: ResumePolicy,
    checkpoint: Checkpoint,
    environ: Mapping[str, str],
) -> tuple[str, ...]:
    """Return the script's arguments that make it resume from a checkpoint.

    An option that is already given gets the new value in its place and spelling. A new option is
    written as `output_dir=x` if the options that `policy` names are written so.

    Args:
        script_args: the script's arguments as the user wrote them.
        policy: `retry.resume`.
        checkpoint: a complete one.
        environ: the variables that the user exported.

    Raises:
        UnknownError: a placeholder has no value.
    """
    of_checkpoint = {"checkpoint": checkpoint.path}
    if checkpoint.step >= 0:
        of_checkpoint["step"] = str(checkpoint.step)

    def known(name: str) -> str | None:
        return of_checkpoint.get(name) or _value(name, script_args, environ)

    argv = tuple(script_args)
    bare = _are_bare(policy, script_args)
    for option in _options([_filled(word, known) for word in policy.args]):
        argv = _with_option(argv, option, bare=bare)
    return argv


def _are_bare(policy: ResumePolicy, script_args: Sequence[str]) -> bool:
    """Return whether the options that a policy names are all given, and all without dashes."""
    names = {
        _name(hole[1]) for hole in _HOLE.finditer(" ".join((policy.checkpoints, *policy.args)))
    }
    given = [word for word in script_args if _name(word) in names - {""}]
    return bool(given) and not any(word.startswith("-") for word in given)


def _filled(text: str, known: Callable[[str], str | None]) -> str:
    """Return a text with its placeholders filled, inner ones first."""
    while hole := _HOLE.search(text):
        value = known(hole[1])
        value = hole[2] if value is None else value
        if value is None:
            raise UnknownError(hole[1])
        hidden = value.translate(str.maketrans(_BRACES, _HIDDEN))
        text = text[: hole.start()] + hidden + text[hole.end() :]
    return text.translate(str.maketrans(_HIDDEN, _BRACES))


def _value(name: str, script_args: Sequence[str], environ: Mapping[str, str]) -> str | None:
    """Return the value of a variable, or the last value that the arguments give to an option."""
    if not name.startswith("-"):
        return environ.get(name)
    value = None
    for word, after in zip(script_args, (*script_args[1:], "-"), strict=False):
        if _name(word) == _name(name):
            _, equals, own = word.partition("=")
            if equals or not _is_option(after):
                value = own if equals else after
    return value


def _options(argv: Sequence[str]) -> list[tuple[str, ...]]:
    """Return arguments by option, each with the values that follow it."""
    options: list[tuple[str, ...]] = []
    for word in argv:
        if options and not _name(word) and _name(options[-1][0]) and "=" not in options[-1][0]:
            options[-1] += (word,)
        else:
            options.append((word,))
    return options


def _with_option(argv: tuple[str, ...], option: tuple[str, ...], *, bare: bool) -> tuple[str, ...]:
    """Return arguments with an option in its existing place, else at the end."""
    name = _name(option[0])
    has_value = len(option) > 1 or "=" in option[0]
    end = argv.index("--") if "--" in argv else len(argv)
    made: list[str] = []
    at, placed = 0, False
    while at < end:
        word = argv[at]
        at += 1
        if not name or _name(word) != name:
            made.append(word)
            continue
        if has_value and "=" not in word and at < end and not _is_option(argv[at]):
            at += 1
        made += () if placed else _spelled(option, word.partition("=")[0].lstrip("~"))
        placed = True
    new = _spelled(option, option[0].partition("=")[0].lstrip("-") if bare else "")
    return (*made, *(() if placed else new), *argv[end:])


def _spelled(option: tuple[str, ...], head: str) -> tuple[str, ...]:
    """Return a one-value option with the head of another spelling; "" keeps its own head.

    >>> _spelled(("--load", "x"), "load"), _spelled(("load=x",), "--load")
    (('load=x',), ('--load=x',))
    """
    _, equals, value = option[0].partition("=")
    if not head or not (equals or len(option) == 2):
        return option
    if not equals and head.startswith("-"):
        return head, option[1]
    return (f"{head}={value if equals else option[1]}",)


def _is_option(word: str) -> bool:
    return word.startswith("-") and not _NUMBER.match(word)


def _name(word: str) -> str:
    """Return the name of an option, such as `--a_b=1` or Hydra's `++a-b=1`; "" for none."""
    head, equals, _ = word.partition("=")
    if _is_option(word) or (equals and re.match(r"[+~]{0,2}[A-Za-z][\w.@/-]*\Z", head)):
        return head.lstrip("-+~").replace("_", "-")
    return ""
