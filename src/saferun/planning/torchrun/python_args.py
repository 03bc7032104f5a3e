"""Pure: a command line as plain python reads it (`launcher: python`).

The part up to SCRIPT, `-m MODULE` or `-c CODE` is read as torchrun's, with saferun's own options.
The rest belongs to the script unchanged: python, unlike torchrun, passes a first `--` on. Only
python has `-c`; torchrun refuses it as an unknown option.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.model import CommandLine
from saferun.planning.torchrun.torchrun_args import Parsed, parse

CODE = "command"  # the name of -c in CommandLine.given; `script` is then code


def read(argv: Sequence[str], parsed: Parsed, own: Mapping[str, str | None]) -> Parsed:
    """Return the command line as plain python reads it, with saferun's own options.

    Args:
        argv: the arguments after `saferun`.
        parsed: the same arguments, as torchrun reads them.
        own: saferun's own options, as in `torchrun_args.parse`.
    """
    if parsed.line.script is not None:
        return parsed._replace(line=_unchanged(argv, parsed.line))
    for at, word in enumerate(argv):
        if word.startswith("-c") and word != "-c=":
            before = parse([*argv[:at], "SCRIPT"], own=own)
            if before.line.script == "SCRIPT" and not before.line.script_args:
                return before._replace(line=_with_code(before.line, argv[at:]))
    return parsed


def _unchanged(argv: Sequence[str], line: CommandLine) -> CommandLine:
    """Return the line with the `--` after SCRIPT that torchrun's parser removes."""
    after = len(argv) - len(line.script_args)
    taken = list(argv[after - 2 : after]) == [line.script, "--"]
    return line._replace(script_args=("--", *line.script_args)) if taken else line


def _with_code(before: CommandLine, rest: Sequence[str]) -> CommandLine:
    code, args = ([rest[0][2:]], rest[1:]) if len(rest[0]) > 2 else (rest[1:2], rest[2:])
    if not code:
        return before._replace(script=None, refusal="-c needs code")
    given = {**before.given, CODE: ""}
    kept = before.args[:-1]  # without the stand-in for the script
    return CommandLine((*kept, *rest), given, code[0], tuple(args))
