"""Read the user's command line and `SAFERUN_*` variables as a Request.

The installed torch is asked for its options where the table of ours is not enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.errors import UnavailableError, UsageError
from saferun.knowledge.torchrun_options import TABLE_TORCH
from saferun.model import Option, Request
from saferun.plan import torchrun_args, torchrun_install, torchrun_probe
from saferun.system import paths

COMMAND_OPTIONS = {"--json": None}  # own options that only `saferun plan` has


def read(words: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read the user's words, with the installed torch's help where our table is not enough.

    Raises:
        UsageError: what saferun itself cannot take; torchrun's own complaints are in
            `line.refusal`.
    """
    return _request(_parse(words, environ, torchrun_args.OWN), environ)


def read_torchrun(words: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read words that are torchrun's alone; our options come from the environment only."""
    return _request(_parse(words, environ, {}), environ)


def _parse(
    words: Sequence[str], environ: Mapping[str, str], own: Mapping[str, str | None]
) -> torchrun_args.Parsed:
    parsed = torchrun_args.parse(words, own=own)
    # an abbreviation is ambiguous by the options of the torch that reads it, script's own included
    if not parsed.unsure and not any(word.startswith("--") for word in parsed.line.script_args):
        return parsed
    options = _installed_options(environ)
    return parsed if options is None else torchrun_args.parse(words, options=options, own=own)


def read_command(words: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, Request]:
    """Read the words after `saferun plan`: those of a launch, and --json before the script."""
    own = {**torchrun_args.OWN, **COMMAND_OPTIONS}
    parsed = _parse(words, environ, own)
    return any(name == "--json" for name, _ in parsed.own), _request(parsed, environ)


def _installed_options(environ: Mapping[str, str]) -> Sequence[Option] | None:
    """The options of the installed torch, where it is another one than our table describes."""
    try:
        launcher = torchrun_install.find_launcher(environ)
    except UnavailableError:
        return None
    version = torchrun_install.torch_version(launcher, environ)
    if version is not None and ".".join(version.split(".")[:2]) == TABLE_TORCH:
        return None
    return torchrun_probe.option_table(launcher, version, paths.cache_dir(environ))


def _request(parsed: torchrun_args.Parsed, environ: Mapping[str, str]) -> Request:
    given = dict(parsed.own)  # the last one counts, as everywhere
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
    """SAFERUN_SET holds KEY=VALUE words, quoted as in a shell where they hold blanks."""
    text = environ.get("SAFERUN_SET", "")
    if not text:
        return []
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"SAFERUN_SET cannot be read: {error}",
            fix="write KEY=VALUE words, quoted as in a shell",
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
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{origin} takes a whole number, not `{text}`", fix="0 is no retry")
    return int(text)
