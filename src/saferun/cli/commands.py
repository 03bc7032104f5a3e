"""The commands (click): parse, call, print; no decisions. A launch never comes here."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

import click

from saferun import __version__
from saferun.errors import UnavailableError, UsageError
from saferun.model import Request
from saferun.plan import inputs
from saferun.plan.request import read, read_command
from saferun.profile import files as profiles


def commands(words: Sequence[str]) -> int:
    """Run one command and return its exit status.

    Raises:
        SaferunError: the caller prints it.
        BrokenPipeError: nobody reads the output any more.
    """
    try:
        return main.main(list(words), prog_name="saferun", standalone_mode=False) or 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except OSError as error:
        if error.filename or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter tries again at exit
        raise UnavailableError(f"the output cannot be written: {error.strerror}") from None


def show_plan(request: Request, environ: Mapping[str, str], cwd: str, *, as_json: bool) -> int:
    """Print the plan of a request and start nothing.

    Raises:
        UsageError: torchrun would refuse these words; the message is torchrun's.
    """
    from saferun.audit import collect
    from saferun.plan import view as page
    from saferun.plan.torchrun_args import launch_only

    line = request.line
    if line.refusal is not None:
        raise UsageError(f"torchrun would refuse this: {line.refusal}", fix=launch_only(line) or "")
    gathered = inputs.look(request, environ, cwd)
    plan = gathered.plan()
    if as_json:
        click.echo(json.dumps(page.as_json(plan), indent=2))
    elif inputs.disabled(environ):
        click.echo(page.as_text(plan))
    else:
        click.echo(page.as_text(plan, collect.findings(line, gathered.facts, environ, cwd)))
    return 0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Stands where torchrun stands. `saferun --help` tells about launches."""


TORCHRUN_WORDS = {
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
    "help_option_names": [],
}


@main.command(context_settings=TORCHRUN_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def plan(words: tuple[str, ...]) -> int:
    """Show what would run; nothing is started. Takes the words of a launch, and --json."""
    if words in (("--help",), ("-h",)):
        click.echo("Usage: saferun plan [--json] [WORDS OF A LAUNCH]...\n")
        click.echo("Show what would run; nothing is started and nothing need exist.")
        return 0
    as_json, request = read_command(words, os.environ)
    return show_plan(request, os.environ, inputs.working_directory(), as_json=as_json)


@main.command()
@click.option("--profile", metavar="NAME|FILE", help="The profile; else SAFERUN_PROFILE, detected.")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Any profile key.")
def env(profile: str | None, sets: tuple[str, ...]) -> int:
    """Print `export` lines for eval: eval "$(saferun env --profile h100)"."""
    from saferun.export.shell_script import exports

    words = [*(["--profile", profile] if profile else []), *(w for s in sets for w in ("--set", s))]
    try:
        request = read([*words, "SCRIPT"], os.environ)
        plan = inputs.show(request, os.environ, inputs.working_directory())
    except Exception:
        click.echo("false")  # so that the eval fails too
        raise
    click.echo(exports(plan), nl=False)
    for remark in plan.remarks:
        click.echo(f"saferun: {remark}", err=True)
    return 0


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


@main.command("gen-shell", context_settings=TORCHRUN_WORDS)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def gen_shell(words: tuple[str, ...]) -> int:
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


@main.command()
@click.argument("log", required=False, metavar="[LOG | -]")
@click.option("--exit-code", type=int, metavar="N", help="Exit status of what wrote the log.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diagnose(log: str | None, exit_code: int | None, as_json: bool) -> int:
    """Explain a failure from its log: what failed, on which rank, and what to do."""
    from saferun.cli import diagnose as room

    if log is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError("no log given", fix="saferun diagnose train.log, or … | saferun diagnose")
    diagnosis = room.run(log, exit_code, os.environ)
    click.echo(room.as_json(diagnosis) if as_json else room.as_text(diagnosis))
    return 0


@main.group("profiles")
def profiles_group() -> None:
    """List, show and check profiles."""


@profiles_group.command("list")
def list_profiles() -> int:
    """List the known profiles; the one for this machine is marked."""
    from saferun.system import gpus

    cwd = inputs.working_directory()
    chosen = profiles.choose(None, "", os.environ, cwd, gpus.detect(os.environ))
    seen: set[str] = set()
    for found in profiles.known(os.environ):
        doc = profiles.load(found, os.environ)
        mark = "*" if doc.path == chosen.chain[-1].path else " "
        shadowed = f" (hidden by the other {found.name})" if found.name in seen else ""
        where = "" if found.shown.startswith("profiles/") else f" [{found.shown}]"
        click.echo(f"{mark} {found.name:<15} {doc.description}{where}{shadowed}")
        seen.add(found.name)
    if chosen.named:
        click.echo(f"* {chosen.origin} of this directory is used where no --profile is given")
    return 0


@profiles_group.command("show")
@click.argument("name")
def show_profile(name: str) -> int:
    """Show every value of a profile, with its reason and its source."""
    import textwrap

    cwd = inputs.working_directory()
    chain = profiles.chain(profiles.find(name, os.environ, cwd), os.environ, cwd)
    last = chain[-1]
    click.echo(f"{last.name}: {last.description}\n{last.path}")
    if len(chain) > 1:
        click.echo("extends " + ", ".join(f"{doc.name} ({doc.path})" for doc in chain[:-1]))
    if last.match:
        click.echo("for GPUs named " + ", ".join(last.match))
    for key in dict.fromkeys(key for doc in chain for key in doc.leaves):
        for doc in (d for d in chain if key in d.leaves):
            leaf = doc.leaves[key]
            when = ", ".join(f"{what} {wanted}" for what, wanted in leaf.when)
            note = f"  when {when}" if when else ""
            click.echo(f"\n{key} = {leaf.value}{note}  [{doc.path}:{leaf.line}]")
            words = leaf.why + (f" <{leaf.source}>" if leaf.source else "")
            wrap = textwrap.wrap(words, 92, break_long_words=False, break_on_hyphens=False)
            for line in wrap:
                click.echo(f"    {line}")
    return 0


@profiles_group.command("check")
@click.argument("files", nargs=-1, required=True)
def check_profiles(files: tuple[str, ...]) -> int:
    """Check profile files and print every error, one a line; exit 78 if there is any."""
    from saferun.errors import EXIT_CONFIG, ProfileError
    from saferun.profile import yaml_reader

    bad = 0
    cwd = inputs.working_directory()
    for name in files:
        path = os.path.join(cwd, name)
        try:
            errors = yaml_reader.check(profiles.read(path, name), name)[1]
            if not errors:
                found = profiles.Found("", path, name)
                profiles.check_chain(profiles.chain(found, os.environ, cwd))
        except ProfileError as mistake:
            errors = [mistake]
        for error in errors:
            click.echo(str(error), err=True)
        click.echo(f"{name}: {len(errors) or 'no'} error{'' if len(errors) == 1 else 's'}")
        bad += len(errors)
    return EXIT_CONFIG if bad else 0


@profiles_group.command("schema")
def print_schema() -> int:
    """Print the JSON Schema of a profile, for editors."""
    from saferun.profile.schema import json_schema

    click.echo(json.dumps(json_schema(), indent=2))
    return 0


RUN_DIR = click.option("--run-dir", metavar="DIR", help="Where runs are; else SAFERUN_RUN_DIR.")
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@main.group("runs")
def runs_group() -> None:
    """List, show and remove what runs left behind; the history of mitigations."""


@runs_group.command("list")
@RUN_DIR
@AS_JSON
def list_runs(run_dir: str | None, as_json: bool) -> int:
    """List the runs, newest first."""
    import shutil

    from saferun.cli import runs_view
    from saferun.journal import reader as runs
    from saferun.system import paths

    base = paths.runs_dir(run_dir, os.environ, inputs.working_directory())
    found, closed = runs.find(base, now := time.time())
    if as_json:
        told = [runs_view.as_json(run) for run in found]
        click.echo(json.dumps({"schema": 1, "runs": told}, indent=2))
    elif found:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo(runs_view.table(found, now, width))
    else:
        click.echo(f"saferun: no runs in {base}", err=True)
    if closed:
        click.echo(f"saferun: {closed} directories there may not be read", err=True)
    return 0


@runs_group.command("show")
@click.argument("run_id", metavar="ID")
@RUN_DIR
@AS_JSON
def show_run(run_id: str, run_dir: str | None, as_json: bool) -> int:
    """Show a run: ID, the beginning of one, or `last`."""
    from saferun.cli import runs_view
    from saferun.journal import reader as runs
    from saferun.journal.attempts import attempts
    from saferun.system import paths

    base = paths.runs_dir(run_dir, os.environ, inputs.working_directory())
    run = runs.named(base, run_id, now := time.time())
    tried, plan = attempts(run), runs.read_plan(run.path)
    if as_json:
        click.echo(json.dumps(runs_view.as_json_whole(run, tried, plan), indent=2))
    else:
        click.echo(runs_view.page(run, tried, plan, now))
    return 0


@runs_group.command("report", context_settings=TORCHRUN_WORDS, hidden=True)
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def report_run(words: tuple[str, ...]) -> int:
    """Say that it is not there yet."""
    raise UsageError(
        f"`saferun runs report` is not in saferun {__version__}", fix="saferun runs show ID"
    )


@runs_group.command("clean")
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(min=0),
    metavar="DAYS",
    help="Spare what was heard of since; 14 where it is not given.",
)
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    metavar="N",
    help="Spare the newest N, however old; 20 where it is not given.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be removed, remove nothing.")
@RUN_DIR
def clean_runs(days: float | None, keep: int | None, dry_run: bool, run_dir: str | None) -> int:
    """Remove runs that are over: your own, neither young nor among the newest."""
    from saferun.cli import runs_view
    from saferun.journal import cleanup
    from saferun.system import paths

    base = paths.runs_dir(run_dir, os.environ, inputs.working_directory())
    done = cleanup.clean(base, time.time(), older_than_days=days, keep=keep, dry_run=dry_run)
    click.echo(runs_view.cleaned(done, dry_run=dry_run))
    cleanup.check_cleaned(done)
    return 0


@runs_group.group("mitigations")
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
        click.echo(json.dumps(runs_view.mitigations_json(known), indent=2))
    elif known:
        click.echo(runs_view.mitigations(known, time.time()))
    else:
        click.echo("saferun: the history of mitigations is empty", err=True)
    return 0


@mitigations_group.command("clear")
@click.argument("script", required=False)
def clear_mitigations(script: str | None) -> int:
    """Forget the mitigations of SCRIPT, or all of them."""
    from saferun.journal import mitigation_history

    gone = mitigation_history.clear(os.environ, script, inputs.working_directory())
    for entry in gone:
        click.echo(f"forgot {entry.mitigation} of {entry.key.script}")
    click.echo(f"{len(gone)} mitigation{'' if len(gone) == 1 else 's'} forgotten")
    return 0


@main.command()
@AS_JSON
@click.option("--full", is_flag=True, help="Measure the GPUs too: a minute at full load.")
@click.option("--recover", is_flag=True, help="First bring GPUs back into use, as far as allowed.")
def doctor(as_json: bool, full: bool, recover: bool) -> int:
    """Check the machine and its GPUs before a job does; exit 1 where there is a problem."""
    from saferun.doctor import examination
    from saferun.doctor import view as page
    from saferun.system.redact import Masker

    cwd = inputs.working_directory()
    known = examination.examine(os.environ, cwd, recover=recover)
    if full:
        known = examination.measure(known, os.environ)
    if as_json:
        mask = Masker(os.environ, ()).text
        told = page.as_json(known.findings, known.vitals, mask)
        click.echo(json.dumps(told, indent=2))
    else:
        to_people = sys.stdout is not None and sys.stdout.isatty()  # None: it is closed
        columns = shutil.get_terminal_size().columns if to_people else page.WIDTH
        colour = to_people and not os.environ.get("NO_COLOR")
        text = page.page(known.findings, colour=colour, columns=columns)
        encoding = (sys.stdout and sys.stdout.encoding) or "utf-8"  # a driver's words may not fit
        click.echo(text.encode(encoding, "backslashreplace").decode(encoding))
    return examination.status(known.findings)
