"""The user's command line and `SAFERUN_*` variables, read as a Request.

Options that the table of torchrun's options does not decide are looked up in the installed torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from saferun.errors import UnavailableError, UsageError
from saferun.knowledge.torchrun_options import of_torch
from saferun.model import Option, Request
from saferun.planning.torchrun import python_args, torchrun_args, torchrun_install, torchrun_probe

COMMAND_OPTIONS = {"--json": None}  # options that `saferun plan` has and a launch has not


def read(argv: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read the command line of a launch.

    Raises:
        UsageError: saferun's own options have a mistake; torchrun's errors are in `line.refusal`.
    """
    return _read(argv, environ, torchrun_args.OWN)[1]


def read_torchrun(argv: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read a command line without options of saferun, which come from the environment only."""
    return _read(argv, environ, {})[1]


def _read(
    argv: Sequence[str], environ: Mapping[str, str], own: Mapping[str, str | None]
) -> tuple[torchrun_args.Parsed, Request]:
    parsed = _parse(argv, environ, own)
    python = python_args.read(argv, parsed, own)
    parsed = parsed._replace(own=python.own)
    return parsed, _request(parsed, environ)._replace(python=python.line)


def _parse(
    argv: Sequence[str], environ: Mapping[str, str], own: Mapping[str, str | None]
) -> torchrun_args.Parsed:
    parsed = torchrun_args.parse(argv, own=own)
    # The installed torch determines which abbreviations are ambiguous, and its parser also refuses
    # them among the script's own arguments.
    if not parsed.unsure and not any(arg.startswith("--") for arg in parsed.line.script_args):
        return parsed
    options = _installed_options(environ)
    return parsed if options is None else torchrun_args.parse(argv, options=options, own=own)


def read_command(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, Request]:
    """Read the arguments of `saferun plan`: a launch's arguments, with --json before the script."""
    own = {**torchrun_args.OWN, **COMMAND_OPTIONS}
    parsed, request = _read(argv, environ, own)
    return any(name == "--json" for name, _ in parsed.own), request


def _installed_options(environ: Mapping[str, str]) -> Sequence[Option] | None:
    """Return the options of the installed torch; None if they cannot be determined."""
    try:
        launcher = torchrun_install.find_launcher(environ)
    except UnavailableError:
        return None
    version = torchrun_install.torch_version(launcher, environ)
    known = of_torch(version) if version else None
    return known or torchrun_probe.option_table(launcher, version, environ)


def _request(parsed: torchrun_args.Parsed, environ: Mapping[str, str]) -> Request:
    given = dict(parsed.own)  # the last occurrence counts, as in torchrun
    profile, origin = given.get("--profile"), "--profile"
    if profile is None:
        profile, origin = environ.get("SAFERUN_PROFILE") or None, "SAFERUN_PROFILE"
    sets = [(*_pair(text, "SAFERUN_SET"), "SAFERUN_SET") for text in _exported_sets(environ)]
    sets += [(*_pair(text, "--set"), "--set") for name, text in parsed.own if name == "--set"]
    return Request(
        line=parsed.line,
        options=torchrun_args.launch_options(parsed.line, environ),
        profile=profile,
        profile_origin=origin if profile else "",
        sets=tuple(sets),
        retries=_retries(given, environ),
        run_dir=given.get("--run-dir") or environ.get("SAFERUN_RUN_DIR") or None,
        dry_run="--dry-run" in given or environ.get("SAFERUN_DRY_RUN", "") not in ("", "0"),
    )


def _exported_sets(environ: Mapping[str, str]) -> list[str]:
    """Return the items of SAFERUN_SET: KEY=VALUE, quoted as in a shell if they contain blanks."""
    text = environ.get("SAFERUN_SET", "")
    if not text:
        return []

    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"SAFERUN_SET cannot be read: {error}",
            fix="write KEY=VALUE items, quoted as in a shell",
        ) from None


def _pair(text: str, origin: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{origin} takes KEY=VALUE, not `{text}`", fix="such as retry.attempts=1")
    return key, value


def _retries(given: Mapping[str, str], environ: Mapping[str, str]) -> int | None:
    origin = "--retries" if "--retries" in given else "SAFERUN_RETRIES"
    text = given.get("--retries") or environ.get("SAFERUN_RETRIES") or ""
    if not text:
        return None
    number = torchrun_args.whole(text)
    if number is None:
        raise UsageError(
            f"{origin} takes a whole number, not `{text[:40]}`", fix="0 means no retry"
        )
    return number
