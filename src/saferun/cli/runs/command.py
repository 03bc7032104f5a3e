"""`saferun runs`: the journals of runs, and the histories of mitigations and of parts."""

from __future__ import annotations

import os
import time

import click

from saferun.base import files
from saferun.cli import colour
from saferun.cli.completers import run_ids
from saferun.cli.options import AS_JSON, HELP, RUN_DIR, echo, echo_json
from saferun.cli.runs import report_html, report_text, runs_view, runs_watch, trials_view
from saferun.diagnosis import signatures
from saferun.errors import UnavailableError, UsageError
from saferun.journal import cleanup, mitigation_history, part_history, report, time_spent, trials
from saferun.journal import reader as runs
from saferun.journal.attempts import attempts
from saferun.planning import inputs


@click.group(context_settings=HELP)
def command() -> None:
    """Watch a run; list, show and remove what runs left behind; what helped, and what failed."""


@command.command("list")
@RUN_DIR
@AS_JSON
def list_runs(base: str, as_json: bool) -> int:
    """List the runs, newest first."""
    found, closed = runs.find(base, now := time.time())
    if as_json:
        shown = [runs_view.as_json(run) for run in found]
        echo_json({"schema": 1, "runs": shown})
    elif found:
        colour.echo_table(runs_view.table(found, now))
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
def show_run(run_id: str, base: str, as_json: bool, as_csv: bool) -> int:
    """Show a run: ID, the beginning of one, or `last`."""
    run = runs.named(base, run_id, now := time.time())
    searched, replaced = trials.read(run.path), trials.replaced(run.path)
    if as_csv:
        click.echo(trials_view.as_csv(searched), nl=False)
        return 0
    tried, plan = attempts(run), runs.read_plan(run.path)
    times = time_spent.read(run, tried, now)
    if as_json:
        shown = runs_view.as_json_whole(run, tried, plan, times)
        if searched:
            shown["trials"] = trials_view.as_json(searched, replaced)
        echo_json(shown)
    else:
        kinds = signatures.load().kinds
        text = runs_view.as_text(run, tried, plan, times, now, kinds)
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
def watch_run(run_id: str | None, interval_s: float, base: str, as_json: bool) -> int:
    """Watch a run until it is over: ID, the beginning of one, or the newest that is going on.

    Drawn on a terminal; elsewhere, and with --json, a line for each change. `q` and Ctrl-C leave
    the run alone.
    """
    run, note = runs_watch.chosen(base, run_id)
    runs_watch.watch(run, note, as_json=as_json, interval_s=interval_s)
    return 0


@command.command("report")
@click.argument("run_id", metavar="ID")
@click.option("--html", metavar="FILE", help="Write one self-contained page; - is stdout.")
@click.option("--markdown", is_flag=True, help="Print Markdown, also beside --html.")
@click.option(
    "--price-per-gpu-hour",
    "price",
    type=click.FloatRange(min=0, max=1e9),
    metavar="X",
    help="What a GPU costs; else what the run's profile says.",
)
@RUN_DIR
@AS_JSON
def report_run(
    run_id: str, html: str | None, markdown: bool, price: float | None, base: str, as_json: bool
) -> int:
    """Report a run to others: what happened, why, and what it cost; as Markdown, or as a page."""
    if price is not None and price != price:  # FloatRange lets NaN pass
        raise UsageError("the price is not a number", where="--price-per-gpu-hour")
    run = runs.named(base, run_id, now := time.time())
    found = report.read_report(run, now, price)
    if price is not None and not found.cost.gpus:
        what = "the run's journal knows of no GPU, so there are no GPU-hours to pay"
        echo(f"saferun: --price-per-gpu-hour: {what}", err=True)
    if html is not None:
        _write(html, report_html.page(found))
    if as_json:
        echo_json(runs_view.report_json(found))
    elif markdown or html is None:
        echo(report_text.as_markdown(found))
    return 0


def _write(path: str, page: str) -> None:
    """Write a page that only the user can read; refuse to replace anything but a plain file.

    Raises:
        UsageError: `path` is something else than a plain file.
        UnavailableError: it cannot be written.
    """
    if path == "-":
        click.echo(page, nl=False, color=True)
        return
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isfile(path)):
        raise UsageError("this is not a regular file", where=path, fix="choose another name")
    try:
        files.replace(path, page.encode("utf-8", "replace"), 0o600)
    except OSError as error:
        what = f"the report cannot be written: {error.strerror}"
        raise UnavailableError(what, where=path, fix="choose another place") from None


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
def clean_runs(days: float | None, keep: int | None, dry_run: bool, base: str) -> int:
    """Remove runs that are over: your own, neither young nor among the newest."""
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
    gone = mitigation_history.clear(os.environ, script, inputs.working_directory())
    for entry in gone:
        echo(f"forgot {entry.mitigation} of {entry.key.script}")
    echo(f"{len(gone)} mitigation{'' if len(gone) == 1 else 's'} forgotten")
    return 0


@command.group("parts")
def parts_group() -> None:
    """List and forget the GPUs and hosts that failed in your last runs."""


@parts_group.command("list")
@AS_JSON
def list_parts(as_json: bool) -> int:
    """List them: which part failed in which runs, of what, and which are named at a start."""
    known = part_history.listed(part_history.load(os.environ))
    if as_json:
        echo_json({"schema": 1, "parts": [runs_view.part_json(part) for part in known]})
    elif known:
        echo(runs_view.parts(known))
    else:
        echo("saferun: no GPU or host is known to have failed", err=True)
    return 0


@parts_group.command("clear")
@click.argument("part", required=False, metavar="[GPU | HOST]")
def clear_parts(part: str | None) -> int:
    """Forget the failures of a GPU (its UUID) or of a host, or all of them."""
    gone = part_history.clear(os.environ, part)
    echo(f"{len(gone)} run{'' if len(gone) == 1 else 's'} with such failures forgotten")
    return 0
