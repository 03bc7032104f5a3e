"""torchrun's command line: its options, where the script begins, and what its parser refuses.

Pure. A command line is read as argparse reads it for torchrun, so that the arguments that torchrun
gets (the user's without saferun's own options) keep the meaning that they had for the user.

Source: torch/distributed/run.py (`get_args_parser`) and CPython's Lib/argparse.py, 3.9 to 3.14.
Rules that are easy to miss:

- argparse removes the first `--` directly before or after the script; a later one is passed on.
- A unique abbreviation is accepted. An ambiguous one is refused, and CPython before 3.12.8 and
  3.13.1 refuses it among the script's arguments too
  (https://github.com/pytorch/pytorch/issues/120601), unless a `--` comes before it. Two spellings
  of one option count as two: `--nproc` is ambiguous.
- An argument that looks like an option is never the value of one, except after `=`. Negative
  numbers, arguments with a blank, `-` and the empty argument do not look like options.

Where CPython's versions differ on a refused line, the message is that of 3.10 and 3.11.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from saferun.errors import UsageError
from saferun.knowledge.command_names import COMMANDS as COMMANDS
from saferun.knowledge.torchrun_options import OPTIONS
from saferun.model import CommandLine, LaunchOptions, LaunchPlan, Option
from saferun.system.spelling import nearest

# saferun's own options, each with the placeholder of its value; None for a flag.
OWN: dict[str, str | None] = {
    "--profile": "NAME",
    "--set": "KEY=VALUE",
    "--retries": "N",
    "--run-dir": "DIR",
    "--dry-run": None,
}

_LAUNCH_ONLY = (
    "{} belongs to torch.distributed.launch; torchrun always passes ranks in the environment: "
    "leave it out"
)
LAUNCH_ONLY = {option: _LAUNCH_ONLY.format(option) for option in ("--use_env", "--use-env")}


class Parsed(NamedTuple):
    """A command line of saferun, split into saferun's own options and torchrun's.

    `own` holds saferun's own options in order, as (option, value); the value of a flag is "".
    `unsure` holds the arguments before SCRIPT that another torch may read differently: options that
    are not in the table, and abbreviations.
    """

    own: tuple[tuple[str, str], ...]
    line: CommandLine
    unsure: tuple[str, ...]


# Values that every torch checks in the same way. torchrun itself checks choices that differ by
# version (--numa-binding).
_NUMBERS: dict[str, type] = {
    "max_restarts": int,
    "monitor_interval": float,
    "node_rank": int,
    "master_port": int,
    "shutdown_timeout": int,
}
_CHOICES = {"start_method": ("spawn", "fork", "forkserver")}

_MISSING = "the following arguments are required: training_script, training_script_args"
_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")


def parse(
    argv: Sequence[str], *, options: Sequence[Option] = OPTIONS, own: Mapping[str, str | None] = OWN
) -> Parsed:
    """Read the arguments after `saferun` (or `saferun run`).

    Args:
        argv: the arguments, as the shell passes them.
        options: table of torchrun's options; with the installed torch's table nothing is `unsure`.
        own: saferun's own options, as in OWN.

    Returns:
        saferun's own options, torchrun's command line, and the arguments that another torch may
        read differently. If torchrun's `--help` is given, `help` is in `line.given`, and script and
        refusal are None.

    Raises:
        UsageError: one of saferun's own options lacks its value, or is a flag and has one.
    """
    walk = _Walk(argv, options, own)
    walk.read_options()
    return Parsed(tuple(walk.own), walk.finish(), tuple(walk.unsure))


def advice(line: CommandLine) -> str:
    """Return what to do about an option that torchrun refuses.

    It is an option of torch.distributed.launch or a misspelt one of saferun's; "" for any other.
    """
    refused = [word.partition("=")[0] for word in (line.refusal or "").split()]
    known = next((text for option, text in LAUNCH_ONLY.items() if option in refused), "")
    if known or not (line.refusal or "").startswith("unrecognized"):
        return known

    close = next(filter(None, (nearest(word, OWN, 0.75) for word in refused)), "")
    return f"did you mean saferun's `{close}`?" if close else ""


def whole(text: str | None) -> int | None:
    """Return a count that is written in digits; None for anything else or an absurd count."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


def ranks(plan: LaunchPlan) -> int:
    """Return how many ranks a plan starts on this machine; 1 if that is unknown."""
    if plan.launcher != "torchrun":
        return 1
    count, gpus, cores = plan.options.processes or "", len(plan.gpus.gpus), os.cpu_count() or 1
    named = {"gpu": gpus, "cpu": cores, "auto": gpus or cores}
    return whole(count) or named.get(count) or 1


def launch_options(line: CommandLine, environ: Mapping[str, str]) -> LaunchOptions:
    """Return the typed values of torchrun's options, from a command line or from `PET_<OPTION>`.

    Args:
        line: the command line; it overrides the variables.
        environ: the environment that torchrun will have.
    """

    def text(dest: str) -> str | None:
        return value_of(line, environ, dest)

    return LaunchOptions(
        nodes=_max_nodes(text("nnodes")),
        processes=text("nproc_per_node"),
        restarts=_int(text("max_restarts") or "0") or 0,
        standalone=text("standalone") is not None,
        backend=text("rdzv_backend") or "static",
        endpoint=(text("rdzv_endpoint") or "").strip(),
        conf=text("rdzv_conf") or "",
        master_addr=text("master_addr") or "",
        shutdown_timeout_s=_int(text("shutdown_timeout") or ""),
        handled_signals=tuple((text("signals_to_handle") or "").replace(" ", "").split(",")),
        module="module" in line.given,
        no_python="no_python" in line.given,
        run_path="run_path" in line.given,
        code="command" in line.given,
        foreign=tuple(sorted(set(line.given) - {"module", "no_python", "command"})),
    )


def value_of(line: CommandLine, environ: Mapping[str, str], dest: str) -> str | None:
    """Return the text that torchrun uses for an option: from the line, else from `PET_<DEST>`.

    Args:
        line: the command line.
        environ: the environment that torchrun will have.
        dest: the option's name in torchrun's namespace, `nproc_per_node`.

    Returns:
        The value; "" for a flag that is on; None if it is in neither.
    """
    if dest in line.given:
        return line.given[dest]
    option = _BY_DEST.get(dest) or Option(dest, (), False, "PET_" + dest.upper())
    text = environ.get(option.env) if option.env else None
    if text is None or not option.flag:
        return text
    return "" if _int(text) else None


def exported(line: CommandLine, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that give torchrun options which the line does not give."""
    names = (one.env for one in OPTIONS if one.env and one.dest not in line.given)
    return {name: environ[name] for name in names if name in environ}


def _max_nodes(text: str | None) -> int | None:
    """Return the most nodes that N or MIN:MAX allows; None if it cannot be read."""
    if text is None:
        return 1
    parts = [_int(part) for part in text.split(":")]
    return parts[-1] if len(parts) <= 2 and None not in parts else None


_BY_DEST = {option.dest: option for option in OPTIONS}


def _int(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


class _Reading(NamedTuple):
    """One way to read an argument that looks like an option."""

    option: Option | None  # None: no such option
    spelled: str  # the full option string
    value: str | None  # attached value: "3" in -t3 and --tee=3


class _Stop(Exception):  # noqa: N818 (help is not an error)
    """torchrun's parser ends here, with an error message, or after its help without one."""


class _Walk:
    """Read a command line from left to right, up to the script."""

    def __init__(
        self, argv: Sequence[str], options: Sequence[Option], own: Mapping[str, str | None]
    ) -> None:
        self.argv = tuple(argv)
        self.strings = {string: option for option in options for string in option.strings}
        self.placeholders = own
        self.at = 0  # the index of the next argument
        self.args: list[str] = []
        self.own: list[tuple[str, str]] = []
        self.given: dict[str, str] = {}
        self.unsure: list[str] = []
        self.unknown: list[str] = []
        self.stopped = False
        self.message: str | None = None

    def read_options(self) -> None:
        """Read up to the script, or to the argument at which torchrun's parser would stop."""
        try:
            while self.at < len(self.argv) and self._read_one(self.argv[self.at]):
                pass
        except _Stop as stop:
            self.stopped = True
            self.message = str(stop) or None

    def finish(self) -> CommandLine:
        """Return the command line; the unread rest is the script and its arguments.

        After a stop the rest is kept unchanged, with saferun's own options: if they were removed,
        the arguments around them could combine to an option that the user did not write.
        """
        rest = self.argv[self.at :]
        script, script_args = (None, ()) if self.stopped else _split(rest)
        if script is not None and self._ambiguity(rest):
            rest = ("--", script, *script_args)
        args = (*self.args, *rest)
        refusal = self._ambiguity(args) or self.message
        if not self.stopped and script is None:
            refusal = refusal or _MISSING
        if self.unknown and not self.stopped:
            refusal = refusal or "unrecognized arguments: " + " ".join(self.unknown)
        if refusal is not None:
            script, script_args = None, ()
        return CommandLine(args, self.given, script, script_args, refusal)

    def _read_one(self, arg: str) -> bool:
        """Read one argument and the value that follows it; return False at the script."""
        if arg == "--":
            return False
        if arg.partition("=")[0] in self.placeholders:
            self._read_own(*arg.partition("="))
            return True
        readings = _readings(arg, self.strings)
        if not readings:
            return False
        reading = readings[0]
        if arg not in LAUNCH_ONLY and (len(readings) > 1 or not _exact(arg, reading)):
            self.unsure.append(arg)
        if len(readings) > 1:
            raise _Stop(_ambiguous(arg, readings))
        if reading.option is None:
            self.unknown.append(arg)
            self._keep(1)
        else:
            self._read_torchrun(reading)
        return True

    def _read_own(self, name: str, equals: str, value: str) -> None:
        """Read one of saferun's own options; it is not passed to torchrun."""
        placeholder = self.placeholders[name]
        self.at += 1
        if placeholder is None:
            if equals:
                raise UsageError(f"{name} takes no value", fix=f"write `{name}` alone")
        elif not equals and self.at < len(self.argv) and self._is_value(self.argv[self.at]):
            value = self.argv[self.at]
            self.at += 1
        if placeholder is not None and not value:
            raise UsageError(
                f"{name} needs a value",
                where="saferun's own options, before the script",
                fix=f"write `{name} {placeholder}` or `{name}={placeholder}`",
            )
        self.own.append((name, value))

    def _read_torchrun(self, reading: _Reading) -> None:
        """Read one of torchrun's options, or several short ones in one argument (`-mt3`)."""
        found, count = self._expand(reading)
        for option, value in found:
            _check_value(option, value)
            self.given[option.dest] = value
            if option.dest == "help":
                raise _Stop
        self._keep(count)

    def _expand(self, reading: _Reading) -> tuple[list[tuple[Option, str]], int]:
        """Return the options and values of this argument, and how many arguments they take."""
        option, spelled, value = reading.option, reading.spelled, reading.value
        assert option is not None
        found: list[tuple[Option, str]] = []
        while option.flag and value is not None:
            short = value != "" and not spelled.startswith("--")
            following = self.strings.get("-" + value[:1]) if short else None
            if following is None:
                raise _Stop(f"{_argument(option)}: ignored explicit argument {value!r}")
            found.append((option, ""))
            option, spelled, value = following, "-" + value[0], value[1:] or None
        if option.flag or value is not None:
            return [*found, (option, value or "")], 1
        following_at = self.at + 1
        if following_at == len(self.argv) or not self._is_value(self.argv[following_at]):
            raise _Stop(f"{_argument(option)}: expected one argument")
        return [*found, (option, self.argv[following_at])], 2

    def _keep(self, count: int) -> None:
        self.args.extend(self.argv[self.at : self.at + count])
        self.at += count

    def _is_value(self, arg: str) -> bool:
        return not _readings(arg, self.strings)  # `--` itself is a prefix of every long option

    def _ambiguity(self, args: Sequence[str]) -> str | None:
        """Return the error message for the first ambiguous argument before a `--`, or None."""
        for arg in args:
            if arg == "--":
                return None
            readings = _readings(arg, self.strings)
            if len(readings) > 1:
                return _ambiguous(arg, readings)
        return None


def _split(rest: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return script and arguments, without a first `--` directly before or after the script."""
    args = list(rest)
    if "--" in args[:2]:
        args.remove("--")
    return (args[0], tuple(args[1:])) if args else (None, ())


def _readings(arg: str, strings: Mapping[str, Option]) -> list[_Reading]:
    """Return all ways to read an argument as an option; empty if it is not one."""
    if len(arg) < 2 or arg[0] != "-":
        return []
    if arg in strings:
        return [_Reading(strings[arg], arg, None)]
    name, equals, after = arg.partition("=")
    value = after if equals else None
    if equals and name in strings:
        return [_Reading(strings[name], name, value)]
    if arg[1] != "-":
        found = [_Reading(strings[arg[:2]], arg[:2], arg[2:])] if arg[:2] in strings else []
    else:
        found = [_Reading(strings[full], full, value) for full in strings if full.startswith(name)]
    if found or " " in arg or _NEGATIVE_NUMBER.match(arg):
        return found
    return [_Reading(None, arg, None)]


def _exact(arg: str, reading: _Reading) -> bool:
    """Return whether the option is written in full, so that every torch with it reads it so."""
    if reading.option is None:
        return False
    return not arg.startswith("--") or arg.partition("=")[0] == reading.spelled


def _ambiguous(arg: str, readings: Sequence[_Reading]) -> str:
    matches = ", ".join(reading.spelled for reading in readings)
    return f"ambiguous option: {arg} could match {matches}"


def _argument(option: Option) -> str:
    return "argument " + "/".join(option.strings)


def _check_value(option: Option, value: str) -> None:
    """Stop if torchrun refuses the value; `--opt=--` is not checked, since Pythons differ."""
    convert = _NUMBERS.get(option.dest)
    choices = _CHOICES.get(option.dest)
    if value == "--":
        return
    try:
        if convert is not None:
            convert(value)
    except ValueError:
        kind = convert.__name__ if convert else ""
        raise _Stop(f"{_argument(option)}: invalid {kind} value: {value!r}") from None
    if choices is not None and value not in choices:
        listed = ", ".join(map(repr, choices))
        raise _Stop(f"{_argument(option)}: invalid choice: {value!r} (choose from {listed})")
