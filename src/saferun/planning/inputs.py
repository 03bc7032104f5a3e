"""Everything that a plan is computed from: command line, profile files, variables, the machine.

This module reads them and calls `build_plan`, which computes the plan.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from saferun.errors import ProfileError, UnavailableError, UsageError
from saferun.model import (
    NO_CHANGES,
    Changes,
    GpuFacts,
    Identity,
    LaunchPlan,
    MachineFacts,
    Profile,
    Request,
)
from saferun.planning.build import build_plan, conditions, disabled_plan
from saferun.planning.own_variables import is_supervised
from saferun.planning.torchrun import torchrun_install
from saferun.planning.torchrun.torchrun_args import advice, launch_options
from saferun.profile import files as profiles
from saferun.profile.files import Chosen
from saferun.profile.merge import Given, is_for_gpus, resolve
from saferun.profile.schema import Doc, Leaf
from saferun.profile.values import read_value
from saferun.settings import RetryPolicy
from saferun.system import gpus as gpu
from saferun.system import paths


class RunInputs(NamedTuple):
    """Everything that was read for a run; the plan of each attempt is computed from it.

    `profile` is None under SAFERUN_DISABLE.
    """

    request: Request
    profile: Profile | None
    facts: MachineFacts
    environ: Mapping[str, str]
    identity: Identity
    runs: str = ""  # the directory of all runs' journals
    launcher: torchrun_install.Launcher | None = None  # None if plain python starts the job
    remarks: tuple[str, ...] = ()

    @property
    def supervised(self) -> bool:
        """Whether saferun stays beside the job; otherwise the job replaces it by exec."""
        return self.profile is not None and is_supervised(self.profile.settings)

    @property
    def starts_python(self) -> bool:
        """Whether plain python starts the job."""
        return self.profile is not None and self.profile.settings.launcher == "python"

    def plan(self, changes: Changes = NO_CHANGES) -> LaunchPlan:
        """Return the plan of the attempt that `identity` names.

        Args:
            changes: the changes of the mitigations in force.

        Raises:
            UsageError: an option of torchrun is given and the profile starts plain python.
        """
        if self.profile is None:
            return disabled_plan(self.request, self.facts)
        plan = build_plan(
            self.request, self.profile, self.facts, self.environ, self.identity, changes
        )
        return plan._replace(remarks=(*self.remarks, *plan.remarks))


def disabled(environ: Mapping[str, str]) -> bool:
    """Return whether SAFERUN_DISABLE asks for plain torchrun."""
    return environ.get("SAFERUN_DISABLE", "") not in ("", "0")


def working_directory() -> str:
    """Return the working directory; "." if it was deleted, which is not an error here."""
    try:
        return os.getcwd()
    except OSError:
        return "."


def gather(
    request: Request, environ: Mapping[str, str], cwd: str, *, starting: bool = False
) -> RunInputs:
    """Return the inputs of a run.

    Args:
        request: the user's request.
        environ: the variables that the user exported.
        cwd: the directory that relative paths start from.
        starting: a job is about to start; otherwise plans are only shown, and torchrun need not
            exist.

    Raises:
        SaferunError: the user made a mistake, whose fix the message names, or there is no torchrun.
    """
    if disabled(environ):
        launcher = _launcher(environ, starting)
        facts = MachineFacts(launcher=launcher.argv)
        return RunInputs(request, None, facts, environ, Identity(""), launcher=launcher)
    gathered = assemble(request, choose(request, environ, cwd), environ, cwd, starting=starting)
    if not starting or gathered.profile is None:
        return gathered
    from saferun.audit import collect  # a generated script has no audit and calls `assemble`

    idle = collect.remark(gathered.request, gathered.profile.env, gathered.facts, environ, cwd)
    return gathered._replace(remarks=(*gathered.remarks, *([idle] if idle else [])))


def check_accepted(gathered: RunInputs) -> None:
    """Check that torchrun would accept the command line.

    Raises:
        UsageError: it would not; the message is torchrun's.
    """
    line = gathered.request.line
    if line.refusal is not None and not gathered.starts_python:
        raise UsageError(f"torchrun would refuse this: {line.refusal}", fix=advice(line))


def choose(request: Request, environ: Mapping[str, str], cwd: str) -> Chosen:
    """Return the profile that applies to a request, the settings that override it, and the GPUs.

    The GPUs are detected once, or not at all if the profile is not for GPUs.

    Args:
        request: the user's request.
        environ: the variables that the user exported.
        cwd: the directory where `./saferun.yaml` is looked for.

    Raises:
        ProfileError: the profile is unknown, unreadable or invalid.
    """
    if not request.profile and profiles.local_profile(cwd)[0] is None:
        gpus = gpu.detect(environ)
        chosen = profiles.choose(None, "", environ, cwd, gpus)
    else:
        chosen = profiles.choose(request.profile, request.profile_origin, environ, cwd, GpuFacts())
        gpus = gpu.detect(environ) if is_for_gpus(chosen.chain) else GpuFacts()
    return chosen._replace(sets=given_settings(request), gpus=gpus)


def assemble(
    request: Request, chosen: Chosen, environ: Mapping[str, str], cwd: str, *, starting: bool
) -> RunInputs:
    """Return the inputs of plans for a chosen profile.

    Args:
        request: the user's request.
        chosen: the profile, the settings that override it and the GPUs.
        environ: the variables that the user exported.
        cwd: the directory that relative paths start from.
        starting: a job is about to start; otherwise torchrun and python need not exist.

    Raises:
        SaferunError: values exclude each other, or torchrun is not installed.
    """
    sets = chosen.sets
    launcher = None if starts_python(chosen.chain, sets) else _launcher(environ, starting)
    if launcher is None:
        request, sets = _for_python(request, sets, environ)
    facts = _facts(launcher, environ, chosen.gpus, starting)
    starts_all = chosen.named and _last(chosen.chain, "torchrun.nproc-per-node") is not None
    here = conditions(request, facts, named=chosen.named, starts_all=starts_all)
    profile = resolve(chosen.chain, sets, here, origin=chosen.origin)
    runs = paths.runs_dir(request.run_dir, environ, cwd)
    which = launcher.remark if launcher else ""
    return RunInputs(
        request,
        profile,
        facts,
        environ,
        _identity(runs, starting),
        runs=runs,
        launcher=launcher,
        remarks=tuple(filter(None, (paths.foreign_home(environ), which, *chosen.remarks))),
    )


def _for_python(
    request: Request, sets: tuple[Given, ...], environ: Mapping[str, str]
) -> tuple[Request, tuple[Given, ...]]:
    """Return a request as plain python reads its command line, and the overriding settings.

    A script on stdin gets one attempt: a second one would find an empty stdin.
    """
    line = request.python or request.line
    options = launch_options(line, environ)
    if line.script == "-" and not (options.module or options.code or options.no_python):
        sets = (*sets, Given("retry.attempts", Leaf(1), "script on stdin"))
    return request._replace(line=line, options=options), sets


def starts_python(chain: Sequence[Doc], sets: Sequence[Given]) -> bool:
    """Return whether a profile and the settings over it start plain python, without torchrun.

    Raises:
        ProfileError: `launcher` has a condition, and is needed before anything is known.
    """
    for doc in chain:
        if "launcher" in doc.leaves and doc.leaves["launcher"].when:
            what = "launcher takes no `when`: it decides how the command line is read"
            raise ProfileError(what, where=doc.path, fix="make two profiles")
    given = [str(one.leaf.value) for one in sets if one.key == "launcher"]
    return (given[-1] if given else _last(chain, "launcher")) == "python"


def _last(chain: Sequence[Doc], key: str) -> str | None:
    found = [str(doc.leaves[key].value) for doc in chain if key in doc.leaves]
    return found[-1] if found else None


def given_settings(request: Request) -> tuple[Given, ...]:
    """Return `--set` and `--retries` as values of profile keys."""
    found = [Given(key, read_value(key, text, by), by) for key, text, by in request.sets]
    if request.retries is not None:
        attempts = request.retries + 1
        total = max(attempts, RetryPolicy().attempts_total)
        found.append(Given("retry.attempts", Leaf(attempts), "--retries"))
        found.append(Given("retry.attempts_total", Leaf(total), "--retries"))
    return tuple(found)


def _facts(
    launcher: torchrun_install.Launcher | None,
    environ: Mapping[str, str],
    gpus: GpuFacts,
    starting: bool,
) -> MachineFacts:
    if launcher is None:
        python = _python(environ, starting)
        version = torchrun_install.torch_version(torchrun_install.of_python(python), environ)
        return MachineFacts(gpu=gpus, torch=version, python=python)
    version = torchrun_install.torch_version(launcher, environ) if launcher.interpreter else None
    return MachineFacts(gpu=gpus, torch=version, launcher=launcher.argv)


def _launcher(environ: Mapping[str, str], starting: bool) -> torchrun_install.Launcher:
    try:
        return torchrun_install.find_launcher(environ)
    except UnavailableError:
        if starting:
            raise
        return torchrun_install.Launcher(("torchrun",), None)


def _python(environ: Mapping[str, str], starting: bool) -> str:
    """Return the first `python` or `python3` on the user's PATH, as a shell would find it."""
    programs = (p for name in ("python", "python3") for p in paths.on_path(name, environ))
    found = next(programs, None)
    if found is None and starting:
        raise UnavailableError("there is no python on PATH", fix="add the directory of one to PATH")
    return found or "python"


def _identity(runs: str, starting: bool) -> Identity:
    """Return the run's name and its receipts' directory; a plan that is only shown has none."""
    site = os.path.join(paths.PACKAGE, "inject", "site")
    if not starting:
        return Identity(site=site)
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Identity(site, run, receipts=os.path.join(runs, run, "receipts"))
