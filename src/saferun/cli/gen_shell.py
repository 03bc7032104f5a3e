"""`saferun gen-shell`: the run as one script that needs no saferun."""

from __future__ import annotations

import os

import click

from saferun.cli.options import TORCHRUN_WORDS
from saferun.plan import inputs

GEN_SHELL = """\
Usage: saferun gen-shell [-o FILE] [SAFERUN OPTIONS] [-- TORCHRUN COMMAND LINE]
       saferun gen-shell --slurm [SLURM OPTIONS] [THE SAME]...
       saferun gen-shell --check FILE

Print the run as one bash script that needs no saferun. Without a command line
the script takes torchrun's words when it is run.

  -o FILE             write it there, executable
  --check FILE        whether FILE is what its own command makes today; status 1 if not

  --slurm             make a file for sbatch: one torchrun on each node
  --nodes N           of so many nodes; 1 where it is not given
  --gpus-per-node G   as sbatch takes it: 8, a100:8
  --time T            as sbatch takes it; it is asked to end two minutes before
  --partition P       as sbatch takes it
  --sbatch=LINE       another directive, such as --sbatch=--account=physics; may be repeated"""


@click.command(context_settings=TORCHRUN_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def command(words: tuple[str, ...]) -> int:
    """Print the run as a bash script that needs no saferun."""
    if words in (("--help",), ("-h",)):
        click.echo(GEN_SHELL)
        return 0
    from saferun.export import generate

    asked, cwd = generate.read(words, os.environ), inputs.working_directory()
    if asked.check is not None:
        why = generate.stale(asked.check, os.environ, cwd, asked)
        click.echo(f"{asked.check}: {f'stale: {why}' if why else 'up to date'}")
        return 1 if why else 0
    made = generate.make(asked, os.environ, cwd)
    for remark in made.remarks:
        click.echo(f"saferun: {remark}", err=True)
    if asked.output is None:
        click.echo(made.text, nl=False)
    else:
        generate.write(asked.output, made.text)
    return 0
