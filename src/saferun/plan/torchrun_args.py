"""torchrun's grammar: which words are its options, where the script begins, what it would refuse.

Pure: words in, values out. It reads a command line as argparse reads it for torchrun, so that the
words which torchrun gets, the user's own less ours, mean to torchrun what they meant to the user.

Source: torch/distributed/run.py (`get_args_parser`) and CPython's Lib/argparse.py, 3.9 to 3.14.
What surprises in it:

- The first `--` that touches the script word is swallowed; a later one reaches the script.
- A unique abbreviation counts. An ambiguous one is refused, and CPython before 3.12.8 and 3.13.1
  refuses it among the script's arguments too (https://github.com/pytorch/pytorch/issues/120601),
  unless a `--` comes before it. Two spellings of one option count as two: `--nproc` is ambiguous.
- A word that looks like an option is never the value of one, except behind `=`. Negative numbers,
  words with a blank, `-` and the empty word do not look like options.

Where CPython's versions differ on a refused line, the message is that of 3.10 and 3.11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from saferun.errors import UsageError
from saferun.knowledge.torchrun_options import OPTIONS
from saferun.model import CommandLine, LaunchOptions, Option
from saferun.named_tuple import NamedTuple

COMMANDS = ("run", "plan", "gen-shell", "env", "profiles", "diagnose", "doctor", "runs")
# saferun's own options, with what stands for their value; None: takes none.
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
LAUNCH_ONLY = {word: _LAUNCH_ONLY.format(word) for word in ("--use_env", "--use-env")}


class Parsed(NamedTuple):
    """A command line of saferun's, taken apart.

    `own` holds saferun's own options in order, as (option, value); the value of a flag is "".
    `unsure` holds the words before SCRIPT that another torch might read otherwise: options that
    the table does not know, and abbreviations.
    """

    own: tuple[tuple[str, str], ...]
    line: CommandLine
    unsure: tuple[str, ...]


# Values that every torch refuses alike. Choices that grow (--numa-binding) are torchrun's to judge.
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
    words: Sequence[str],
    *,
    options: Sequence[Option] = OPTIONS,
    own: Mapping[str, str | None] = OWN,
) -> Parsed:
    """Read the words after `saferun` (or `saferun run`).

    Args:
        words: the command line, as the shell made it.
        options: torchrun's option table; that of the installed torch settles `unsure` words.
        own: saferun's own options here, as in OWN.

    Returns:
        saferun's own options, torchrun's line, and the words that another torch may read otherwise.
        With torchrun's `--help` in the line, `help` is in `line.given`, and script and refusal
        are None.

    Raises:
        UsageError: one of saferun's own options lacks its value, or has one that it cannot take.
    """
    walk = _Walk(words, options, own)
    walk.read_options()
    return Parsed(tuple(walk.own), walk.finish(), tuple(walk.unsure))


def launch_only(line: CommandLine) -> str | None:
    """Return the word of advice for an option that only torch.distributed.launch has, or None."""
    refused = (line.refusal or "").split()
    return next((advice for word, advice in LAUNCH_ONLY.items() if word in refused), None)


def launch_options(line: CommandLine, environ: Mapping[str, str]) -> LaunchOptions:
    """Return what torchrun's options in a line, or in `PET_<OPTION>` where it has none, mean.

    Args:
        line: the command line.
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
        handles_signals=text("signals_to_handle") is not None,
        module="module" in line.given,
        no_python="no_python" in line.given,
        run_path="run_path" in line.given,
        foreign=tuple(sorted(set(line.given) - {"module", "no_python"})),
    )


def value_of(line: CommandLine, environ: Mapping[str, str], dest: str) -> str | None:
    """Return the text that torchrun takes for an option: the line's, else that of `PET_<DEST>`.

    Args:
        line: the command line.
        environ: the environment that torchrun will have.
        dest: the option's name in torchrun's namespace, `nproc_per_node`.

    Returns:
        The value, "" for a flag that is on, None for what neither says.
    """
    if dest in line.given:
        return line.given[dest]
    option = _BY_DEST.get(dest) or Option(dest, (), False, "PET_" + dest.upper())
    text = environ.get(option.env) if option.env else None
    if text is None or not option.flag:
        return text
    return "" if _int(text) else None


def _max_nodes(text: str | None) -> int | None:
    """The most nodes that N or MIN:MAX allows; None where it is unreadable."""
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
    """One way to read an option-like word."""

    option: Option | None  # None: no such option
    spelled: str  # the option string that it stands for
    value: str | None  # what is attached to it: "3" in -t3 and --tee=3


class _Stop(Exception):  # noqa: N818 (help is no error)
    """torchrun's parser ends here: with a complaint, or without one after its help."""


class _Walk:
    """Reads a command line from left to right, up to the script; keeps what it has read."""

    def __init__(
        self, words: Sequence[str], options: Sequence[Option], own: Mapping[str, str | None]
    ) -> None:
        self.words = tuple(words)
        self.strings = {string: option for option in options for string in option.strings}
        self.placeholders = own
        self.at = 0  # the next word
        self.args: list[str] = []
        self.own: list[tuple[str, str]] = []
        self.given: dict[str, str] = {}
        self.unsure: list[str] = []
        self.unknown: list[str] = []
        self.stopped = False
        self.complaint: str | None = None

    def read_options(self) -> None:
        """Read up to the script, or to the word at which torchrun's parser would stop."""
        try:
            while self.at < len(self.words) and self._read_one(self.words[self.at]):
                pass
        except _Stop as stop:
            self.stopped = True
            self.complaint = str(stop) or None

    def finish(self) -> CommandLine:
        """Return the line, with the rest of the words as script and arguments where it gets so far.

        After a stop the rest stays as it is, our own options too: without them the words beside
        them could come together to something that the user never wrote.
        """
        rest = self.words[self.at :]
        script, script_args = (None, ()) if self.stopped else _split(rest)
        if script is not None and self._ambiguity(rest):
            rest = ("--", script, *script_args)
        args = (*self.args, *rest)
        refusal = self._ambiguity(args) or self.complaint
        if not self.stopped and script is None:
            refusal = refusal or _MISSING
        if self.unknown and not self.stopped:
            refusal = refusal or "unrecognized arguments: " + " ".join(self.unknown)
        if refusal is not None:
            script, script_args = None, ()
        return CommandLine(args, self.given, script, script_args, refusal)

    def _read_one(self, word: str) -> bool:
        """Read one word, with its value where it takes one; False where the script begins."""
        if word == "--":
            return False
        if word.partition("=")[0] in self.placeholders:
            self._read_own(*word.partition("="))
            return True
        readings = _readings(word, self.strings)
        if not readings:
            return False
        reading = readings[0]
        if word not in LAUNCH_ONLY and (len(readings) > 1 or not _exact(word, reading)):
            self.unsure.append(word)
        if len(readings) > 1:
            raise _Stop(_ambiguous(word, readings))
        if reading.option is None:
            self.unknown.append(word)
            self._keep(1)
        else:
            self._read_torchrun(reading)
        return True

    def _read_own(self, name: str, equals: str, value: str) -> None:
        """Read one of saferun's own options; torchrun gets none of its words."""
        placeholder = self.placeholders[name]
        self.at += 1
        if placeholder is None:
            if equals:
                raise UsageError(f"{name} takes no value", fix=f"write `{name}` alone")
        elif not equals and self.at < len(self.words) and self._is_value(self.words[self.at]):
            value = self.words[self.at]
            self.at += 1
        if placeholder is not None and not value:
            raise UsageError(
                f"{name} needs a value",
                where="saferun's own options, before the script",
                fix=f"write `{name} {placeholder}` or `{name}={placeholder}`",
            )
        self.own.append((name, value))

    def _read_torchrun(self, reading: _Reading) -> None:
        """Read one of torchrun's options, or several short ones in one word (`-mt3`)."""
        found, count = self._expand(reading)
        for option, value in found:
            _check_value(option, value)
            self.given[option.dest] = value
            if option.dest == "help":
                raise _Stop
        self._keep(count)

    def _expand(self, reading: _Reading) -> tuple[list[tuple[Option, str]], int]:
        """Return the options in this word with their values, and how many words they take."""
        option, spelled, value = reading
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
        if following_at == len(self.words) or not self._is_value(self.words[following_at]):
            raise _Stop(f"{_argument(option)}: expected one argument")
        return [*found, (option, self.words[following_at])], 2

    def _keep(self, count: int) -> None:
        self.args.extend(self.words[self.at : self.at + count])
        self.at += count

    def _is_value(self, word: str) -> bool:
        return not _readings(word, self.strings)  # `--` itself reads as every long option

    def _ambiguity(self, words: Sequence[str]) -> str | None:
        """Return the complaint about the first ambiguous word before a `--`, or None."""
        for word in words:
            if word == "--":
                return None
            readings = _readings(word, self.strings)
            if len(readings) > 1:
                return _ambiguous(word, readings)
        return None


def _split(rest: Sequence[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return script and arguments; the first `--` goes if it touches the script on either side."""
    words = list(rest)
    if "--" in words[:2]:
        words.remove("--")
    return (words[0], tuple(words[1:])) if words else (None, ())


def _readings(word: str, strings: Mapping[str, Option]) -> list[_Reading]:
    """Return all ways to read a word where an option may stand; none: it is no option."""
    if len(word) < 2 or word[0] != "-":
        return []
    if word in strings:
        return [_Reading(strings[word], word, None)]
    name, equals, after = word.partition("=")
    value = after if equals else None
    if equals and name in strings:
        return [_Reading(strings[name], name, value)]
    if word[1] != "-":
        found = [_Reading(strings[word[:2]], word[:2], word[2:])] if word[:2] in strings else []
    else:
        found = [_Reading(strings[full], full, value) for full in strings if full.startswith(name)]
    if found or " " in word or _NEGATIVE_NUMBER.match(word):
        return found
    return [_Reading(None, word, None)]


def _exact(word: str, reading: _Reading) -> bool:
    """Return whether the word spells its option out, so that any torch with it reads it so."""
    if reading.option is None:
        return False
    return not word.startswith("--") or word.partition("=")[0] == reading.spelled


def _ambiguous(word: str, readings: Sequence[_Reading]) -> str:
    matches = ", ".join(reading.spelled for reading in readings)
    return f"ambiguous option: {word} could match {matches}"


def _argument(option: Option) -> str:
    return "argument " + "/".join(option.strings)


def _check_value(option: Option, value: str) -> None:
    """Stop where torchrun refuses the value itself. `--opt=--` is left alone: versions differ."""
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
