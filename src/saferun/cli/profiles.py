"""`saferun profiles`: list, show and check profiles; print their JSON Schema."""

from __future__ import annotations

import os
import textwrap

import click

from saferun.cli.completers import profile_names
from saferun.cli.options import HELP, echo, echo_json
from saferun.errors import EXIT_CONFIG, ProfileError
from saferun.planning import inputs
from saferun.profile import files as profiles
from saferun.profile import yaml_reader
from saferun.profile.schema import json_schema
from saferun.system import gpus


@click.group(context_settings=HELP)
def command() -> None:
    """List, show and check profiles."""


@command.command("list")
def list_profiles() -> int:
    """List the known profiles; the one for this machine is marked."""
    cwd = inputs.working_directory()
    chosen = profiles.choose(None, "", os.environ, cwd, gpus.detect(os.environ))
    seen: set[str] = set()
    known = profiles.known(os.environ)
    width = max(len(found.name) for found in known)
    for found in known:
        doc = profiles.load(found, os.environ)
        mark = "*" if doc.path == chosen.chain[-1].path else " "
        shadowed = f" (hidden by the other {found.name})" if found.name in seen else ""
        where = "" if found.shown.startswith("profiles/") else f" [{found.shown}]"
        echo(f"{mark} {found.name:<{width}}  {doc.description}{where}{shadowed}")
        seen.add(found.name)
    if chosen.named:
        echo(f"* {chosen.origin} of this directory is used where no --profile is given")
    return 0


@command.command("show")
@click.argument("name", shell_complete=profile_names)
def show_profile(name: str) -> int:
    """Show every value of a profile, with its reason and its source."""
    found = profiles.find(name, os.environ, inputs.working_directory())
    chain = profiles.chain(found, os.environ)
    last = chain[-1]
    echo(f"{last.name}: {last.description}\n{last.path}")
    if len(chain) > 1:
        echo("extends " + ", ".join(f"{doc.name} ({doc.path})" for doc in chain[:-1]))
    if last.match:
        echo("for GPUs named " + ", ".join(last.match))
    for key in dict.fromkeys(key for doc in chain for key in doc.leaves):
        for doc in (d for d in chain if key in d.leaves):
            leaf = doc.leaves[key]
            when = ", ".join(f"{what} {wanted}" for what, wanted in leaf.when)
            note = f"  when {when}" if when else ""
            echo(f"\n{key} = {leaf.value}{note}  [{doc.path}:{leaf.line}]")
            reason = leaf.why + (f" <{leaf.source}>" if leaf.source else "")
            wrap = textwrap.wrap(reason, 92, break_long_words=False, break_on_hyphens=False)
            for line in wrap:
                echo(f"    {line}")
    return 0


@command.command("check")
@click.argument("files", nargs=-1, required=True, type=click.Path())
def check_profiles(files: tuple[str, ...]) -> int:
    """Check profile files and print every error, one a line; exit 78 if there is any."""
    bad = 0
    cwd = inputs.working_directory()
    for name in files:
        path = os.path.join(cwd, name)
        try:
            errors = yaml_reader.check(profiles.read(path, name), name)[1]
            if not errors:
                found = profiles.Found("", path, name)
                profiles.check_chain(profiles.chain(found, os.environ))
        except ProfileError as mistake:
            errors = [mistake]
        for error in errors:
            echo(str(error), err=True)
        echo(f"{name}: {len(errors) or 'no'} error{'' if len(errors) == 1 else 's'}")
        bad += len(errors)
    return EXIT_CONFIG if bad else 0


@command.command("schema")
def print_schema() -> int:
    """Print the JSON Schema of a profile, for editors."""
    echo_json(json_schema())
    return 0
