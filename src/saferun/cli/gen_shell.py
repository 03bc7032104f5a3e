"""`saferun gen-shell`: the run as one script that needs no saferun."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from saferun.cli.options import HELP, TORCHRUN_ARGUMENTS, echo
from saferun.export import generate, sbatch
from saferun.export.generate import ScriptRequest
from saferun.planning import inputs
from saferun.planning.request import read as read_request

_START = ("torchrun", "saferun")  # how a pasted command line may begin


def _value(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    """Refuse a value that is empty (an unset variable) or that is the next option."""
    if text is not None and (not text or text.startswith("-")):
        raise click.BadParameter(f"it takes a value, and `{text}` is none")
    return text


def _once(*names: str, metavar: str, help: str) -> Callable[[Any], Any]:
    """Return an option that takes one value."""
    return click.option(*names, callback=_value, metavar=metavar, help=help)


@click.command(context_settings={**TORCHRUN_ARGUMENTS, **HELP})
@_once("-o", "output", metavar="FILE", help="Write it there, executable.")
@_once(
    "--check",
    metavar="FILE",
    help="Check that FILE is what its own command makes today; else status 1.",
)
@click.option(
    "--plain",
    is_flag=True,
    help="At most 200 lines to read and commit, without saferun's own code: variables, hooks, a "
    "lock, and torchrun again where a signal ended a rank or an error may pass; no diagnosis.",
)
@click.option("--slurm", is_flag=True, help="Make a file for sbatch: one torchrun on each node.")
@_once("--nodes", metavar="N", help="With --slurm: number of nodes; 1 if it is not given.")
@_once("--gpus-per-node", metavar="G", help="As sbatch takes it: 8, a100:8.")
@_once("--time", metavar="T", help="As sbatch takes it; Slurm signals the job two minutes before.")
@_once("--partition", metavar="P", help="As sbatch takes it.")
@click.option(
    "--sbatch",
    metavar="LINE",
    multiple=True,
    help="Another directive, such as --sbatch=--account=physics; may be repeated.",
)
@_once("--profile", metavar="NAME|FILE", help="As for a launch.")
@click.option("--set", metavar="KEY=VALUE", multiple=True, help="As for a launch; may be repeated.")
@_once("--retries", metavar="N", help="As for a launch.")
@_once("--run-dir", metavar="DIR", help="As for a launch.")
@click.option("--dry-run", is_flag=True, hidden=True)  # without effect: nothing is started anyway
@click.argument("line", nargs=-1, type=click.UNPROCESSED, metavar="[-- TORCHRUN COMMAND LINE]")
def command(**given: Any) -> int:
    """Print the run as one bash script that needs no saferun.

    Without a command line the script takes torchrun's arguments when it is run.
    """
    request, cwd = _request(given, os.environ), inputs.working_directory()
    if request.check is not None:
        why = generate.stale(request.check, os.environ, cwd, request, read)
        echo(f"{request.check}: {f'stale: {why}' if why else 'up to date'}")
        return 1 if why else 0
    script = generate.make(request, os.environ, cwd)
    for remark in script.remarks:
        echo(f"saferun: {remark}", err=True)
    if request.output is None:
        click.echo(script.text, nl=False, color=True)
    else:
        generate.write(request.output, script.text, private=script.private)
    return 0


def read(argv: Sequence[str], environ: Mapping[str, str]) -> ScriptRequest:
    """Read the arguments of `gen-shell`: its own options, then torchrun's command line.

    Raises:
        click.UsageError: an option lacks its value.
        SaferunError: saferun or torchrun would refuse the arguments.
    """
    return _request(command.make_context("saferun gen-shell", list(argv)).params, environ)


def _request(given: Mapping[str, Any], environ: Mapping[str, str]) -> ScriptRequest:
    named = {name: given[name[2:].replace("-", "_")] for name in sbatch.NAMED}
    slurm = sbatch.read(given["slurm"], named, given["sbatch"])
    once = {"--profile": "profile", "--retries": "retries", "--run-dir": "run_dir"}
    ours = [f"{name}={given[key]}" for name, key in once.items() if given[key] is not None]
    ours += [f"--set={text}" for text in given["set"]]
    line = given["line"][1:] if given["line"][:1] and given["line"][0] in _START else given["line"]
    return ScriptRequest(
        read_request([*ours, "SCRIPT"], environ),
        generate.checked(line, environ),
        given["output"],
        given["check"],
        bare=not ours and not line and slurm is None and not given["plain"],
        slurm=slurm,
        plain=given["plain"],
    )
