"""`saferun gen-shell`: the run as one script that needs no saferun."""

from __future__ import annotations

import os

import click

from saferun.cli.options import TORCHRUN_ARGUMENTS, echo
from saferun.export import generate
from saferun.planning import inputs

GEN_SHELL = """\
Usage: saferun gen-shell [-o FILE] [--plain] [SAFERUN OPTIONS] [-- TORCHRUN COMMAND LINE]
       saferun gen-shell --slurm [SLURM OPTIONS] [THE SAME]...
       saferun gen-shell --check FILE

Print the run as one bash script that needs no saferun. Without a command line
the script takes torchrun's arguments when it is run.

  -o FILE             write it there, executable
  --check FILE        check that FILE is what its own command makes today; else status 1
  --plain             at most 60 lines, without saferun's own code: variables, and torchrun again
                      where a signal ended a rank; no locks, no diagnosis, no hooks

  --slurm             make a file for sbatch: one torchrun on each node
  --nodes N           number of nodes; 1 if it is not given
  --gpus-per-node G   as sbatch takes it: 8, a100:8
  --time T            as sbatch takes it; Slurm signals the job two minutes before
  --partition P       as sbatch takes it
  --sbatch=LINE       another directive, such as --sbatch=--account=physics; may be repeated"""


@click.command(context_settings=TORCHRUN_ARGUMENTS)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def command(argv: tuple[str, ...]) -> int:
    """Print the run as a bash script that needs no saferun."""
    if argv in (("--help",), ("-h",)):
        click.echo(GEN_SHELL)
        return 0

    request, cwd = generate.read(argv, os.environ), inputs.working_directory()
    if request.check is not None:
        why = generate.stale(request.check, os.environ, cwd, request)
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
