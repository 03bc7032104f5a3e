"""Prints a launch's line about settings, with the files that it took."""

import json
import sys

from saferun.audit import collect
from saferun.model import CommandLine, MachineFacts, Request
from saferun.planning.torchrun.torchrun_args import launch_options

environ = json.loads(sys.argv[1])
opened: list[str] = []
counted = False


def count(event: str, arguments: tuple[object, ...]) -> None:
    """Record the data files that are opened (an audit hook); imports open source files."""
    if counted and event == "open" and not str(arguments[0]).endswith((".py", ".pyc")):
        opened.append(str(arguments[0]))


sys.addaudithook(count)
counted = True
command_line = CommandLine((), {}, None, ())
request = Request(command_line, launch_options(command_line, {}))
line = collect.remark(request, {}, MachineFacts(torch="2.13.0"), environ, ".")
counted = False
print(json.dumps({"line": line, "opened": opened}))
