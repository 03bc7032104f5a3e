"""`saferun runs`: the journals of runs, and the history of mitigations."""

from __future__ import annotations

import os
import shutil
import sys
import time

import click

from saferun import __version__
from saferun.cli.completers import run_ids
from saferun.cli.options import AS_JSON, HELP, RUN_DIR, TORCHRUN_ARGUMENTS, echo, echo_json
from saferun.errors import UsageError
from saferun.planning import inputs


@click.group(context_settings=HELP)
def command() -> None:
    """Watch a run; list, show and remove what runs left behind; the history of mitigations."""


@command.command("list")
@RUN_DIR
@AS_JSON
def list_runs(run_dir: str | None, as_json: bool) -> int:
    """List the runs, newest first."""
    from saferun.cli import colour, runs_view
    from saferun.journal import reader as runs
    from saferun.system import paths

    base = paths.runs_dir(run_dir, os.environ, inputs.working_directory())
    found, closed = runs.find(base, now := time.time())
    if as_json:
        shown = [runs_view.as_json(run) for run in found]
        echo_json({"schema": 1, "runs": shown})
    elif found:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        colour.echo_table(runs_view.table(found, now, width))
    else:
        echo(f"saferun: no runs in {base}", err=True)
    if closed:
        echo(f"saferun: {closed} directories there may not be read", err=True)
    return 0


@command.command("show")
@click.argument("run_id", metavar="ID", shell_complete=run_ids)
@RUN_DIR
@AS_JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print the run's trials, a row each.")
def show_run(run_id: str, run_dir: str | None, as_json: bool, as_csv: bool) -> int:
    """Show a run: ID, the beginning of one, or `last`."""
    from saferun.cli import colour, runs_view, trials_view
    from saferun.journal import reader as runs
    from saferun.journal import trials
    from saferun.journal.attempts import attempts
    from saferun.system import paths

    base = paths.runs_dir(run_dir, os.environ, inputs.working_directory())
    run = runs.named(base, run_id, now := time.time())
    searched, replaced = trials.read(run.path), trials.replaced(run.path)
    if as_csv:
        click.echo(trials_view.as_csv(searched), nl=False)
        return 0
    tried, plan = attempts(run), runs.read_plan(run.path)
    if as_json:
        shown = runs_view.as_json_whole(run, tried, plan)
        if searched:
            shown["trials"] = trials_view.as_json(searched, replaced)
        echo_json(shown)
    else:
        text = runs_view.as_text(run, tried, plan, now)
        colour.echo_page("\n".join([text, *trials_view.as_text(searched, replaced)]))
    return 0


@command.command("watch")
@click.argument("run_id", metavar="[ID]", required=False)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    metavar="SECONDS",
    help="Between two looks; 2 if it is not given.",
)
@RUN_DIR
@AS_JSON
def watch_run(run_id: str | None, interval_s: float, run_dir: str | None, as_json: bool) -> int:
    """Watch a run until it is over: ID, the beginning of one, or the newest that is going on.

    Drawn on a terminal; elsewhere, and with --json, a line for each change. Ctrl-C leaves the run
    alone.
    """
    from saferun.cli import runs_watch
    from saferun.system import paths

    base = paths.runs_dir(run_dir, os.environ, inputs.working_directory())
    run, note = runs_watch.chosen(base, run_id)
    runs_watch.watch(run, note, as_json=as_json, interval_s=interval_s)
    return 0


@command.command("report", context_settings=TORCHRUN_ARGUMENTS, hidden=True)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def report_run(argv: tuple[str, ...]) -> int:
    """Refuse a command that does not exist yet."""
    raise UsageError(
        f"`saferun runs report` is not in saferun {__version__}", fix="saferun runs show ID"
    )


@command.command("clean")
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Keep runs that wrote something since; 14 if it is not given.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    metavar="N",
    help="Keep the newest N, however old; 20 if it is not given.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, remove nothing.")
@RUN_DIR
def clean_runs(days: float | None, keep: int | None, dry_run: bool, run_dir: str | None) -> int:
    """Remove runs that are over: your own, neither young nor among the newest."""
    from saferun.cli import runs_view
    from saferun.journal import cleanup
    from saferun.system import paths

    base = paths.runs_dir(run_dir, os.environ, inputs.working_directory())
    done = cleanup.clean(base, time.time(), older_than_days=days, keep=keep, dry_run=dry_run)
    echo(runs_view.cleaned(done, dry_run=dry_run))
    cleanup.check_cleaned(done)
    return 0


@command.group("mitigations")
def mitigations_group() -> None:
    """List and forget the mitigations in the history, which start with their script."""


@mitigations_group.command("list")
@AS_JSON
def list_mitigations(as_json: bool) -> int:
    """List the mitigations in the history: for what, where, since when and until when."""
    from saferun.cli import runs_view
    from saferun.journal import mitigation_history

    known = mitigation_history.listed(os.environ)
    if as_json:
        echo_json(runs_view.mitigations_json(known))
    elif known:
        echo(runs_view.mitigations(known, time.time()))
    else:
        echo("saferun: the history of mitigations is empty", err=True)
    return 0


@mitigations_group.command("clear")
@click.argument("script", required=False, type=click.Path())
def clear_mitigations(script: str | None) -> int:
    """Forget the mitigations of SCRIPT, or all of them."""
    from saferun.journal import mitigation_history

    gone = mitigation_history.clear(os.environ, script, inputs.working_directory())
    for entry in gone:
        echo(f"forgot {entry.mitigation} of {entry.key.script}")
    echo(f"{len(gone)} mitigation{'' if len(gone) == 1 else 's'} forgotten")
    return 0
