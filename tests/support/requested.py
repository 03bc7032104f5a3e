"""A request as the command line makes it, for tests that need one and no launch."""

from saferun.model import CommandLine, Request
from saferun.planning.torchrun.torchrun_args import launch_options

TORCH = "2.13.0+cpu"


def requested(script: str | None, **given: str) -> Request:
    """Return a request for a script, with options of torchrun by their names in its parser."""
    line = CommandLine((), given, script, ())
    return Request(line, launch_options(line, {}))
