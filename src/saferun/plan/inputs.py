"""Ask the world what a plan needs to know, then have it computed.

This is where words, files, variables and the machine come together; nothing is decided here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from saferun.audit import collect
from saferun.errors import UnavailableError
from saferun.model import (
    NO_CHANGES,
    Changes,
    Facts,
    GpuFacts,
    Identity,
    LaunchPlan,
    Profile,
    Request,
)
from saferun.named_tuple import NamedTuple
from saferun.plan import torchrun_install
from saferun.plan.build import build_plan, conditions, disabled_plan
from saferun.profile import files as profiles
from saferun.profile import settings
from saferun.profile.merge import Given, is_for_gpus, resolve
from saferun.profile.schema import Doc, Leaf
from saferun.system import gpus as gpu
from saferun.system import paths


class Gathered(NamedTuple):
    """All that was asked of the world for a run, so that each attempt's plan is computed from it.

    `profile` is None under SAFERUN_DISABLE.
    """

    request: Request
    profile: Profile | None
    facts: Facts
    environ: Mapping[str, str]
    identity: Identity
    runs: str = ""  # the directory of all runs' journals
    launcher: torchrun_install.Launcher | None = None  # None where plain python starts the job
    remarks: tuple[str, ...] = ()

    @property
    def supervised(self) -> bool:
        """Whether saferun stays beside the job; else it is replaced by it."""
        return self.profile is not None and self.profile.settings.retry.attempts > 1

    def plan(self, changes: Changes = NO_CHANGES) -> LaunchPlan:
        """Compute the plan of the attempt that `identity` names.

        Args:
            changes: what the mitigations in force change.

        Raises:
            UsageError: options that this launcher cannot take.
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
    """Return the working directory; "." where it has vanished, which stops nobody."""
    try:
        return os.getcwd()
    except OSError:
        return "."


def show(request: Request, environ: Mapping[str, str], cwd: str) -> LaunchPlan:
    """Return the plan that would run; nothing is started and nothing need exist.

    Raises:
        SaferunError: the user's mistake, said.
    """
    return look(request, environ, cwd).plan()


def look(request: Request, environ: Mapping[str, str], cwd: str) -> Gathered:
    """Return what a plan that is only shown is computed from.

    Raises:
        SaferunError: the user's mistake, said.
    """
    return _gather(request, environ, cwd, starting=False)


def start(request: Request, environ: Mapping[str, str], cwd: str) -> Gathered:
    """Return what the plans of a run that is about to start are computed from.

    Raises:
        SaferunError: the user's mistake, or a torchrun that is not there.
    """
    return _gather(request, environ, cwd, starting=True)


class Selection(NamedTuple):
    """The profile that a request means, the user's settings over it, and the GPUs."""

    chosen: profiles.Chosen
    sets: Sequence[Given]
    gpus: GpuFacts


def _gather(request: Request, environ: Mapping[str, str], cwd: str, *, starting: bool) -> Gathered:
    if disabled(environ):
        facts = Facts(launcher=_launcher(environ, starting).argv)
        return Gathered(request, None, facts, environ, Identity(""))
    return assemble(request, choose(request, environ, cwd), environ, cwd, starting=starting)


def choose(request: Request, environ: Mapping[str, str], cwd: str) -> Selection:
    """Return the profile that a request means, the user's settings over it, and the GPUs.

    Raises:
        ProfileError: unknown, unreadable or wrong.
    """
    chosen, gpus = _choose(request, environ, cwd)
    return Selection(chosen, tuple(_sets(request)), gpus)


def assemble(
    request: Request,
    selection: Selection,
    environ: Mapping[str, str],
    cwd: str,
    *,
    starting: bool,
) -> Gathered:
    """Return what plans are computed from, where the profile is known already.

    Args:
        request: what the user asked for.
        selection: the profile, the settings over it and the GPUs.
        environ: what the user exported.
        cwd: where relative paths start.
        starting: a job is about to start; else nothing need exist.

    Raises:
        SaferunError: values that exclude each other, or a torchrun that is not there.
    """
    chosen, sets, gpus = selection
    launcher = None if _starts_python(selection) else _launcher(environ, starting)
    facts = _facts(launcher, environ, gpus, starting)
    starts_all = chosen.named and _last(chosen.chain, "torchrun.nproc-per-node") is not None
    here = conditions(request, facts, starts_all=starts_all)
    profile = resolve(chosen.chain, sets, here, named=chosen.named, origin=chosen.origin)
    runs = paths.runs_dir(request.run_dir, environ, cwd)
    idle = collect.remark(request.line, profile.env, facts, environ, cwd) if starting else ""
    return Gathered(
        request,
        profile,
        facts,
        environ,
        _identity(runs, starting),
        runs=runs,
        launcher=launcher,
        remarks=(*chosen.remarks, *([idle] if idle else [])),
    )


def _choose(
    request: Request, environ: Mapping[str, str], cwd: str
) -> tuple[profiles.Chosen, GpuFacts]:
    """Choose the profile; GPUs are asked for once, and not at all where the profile is for none."""
    if not request.profile and not os.path.exists(os.path.join(cwd, profiles.LOCAL)):
        gpus = gpu.detect(environ)
        return profiles.choose(None, "", environ, cwd, gpus), gpus
    chosen = profiles.choose(request.profile, request.profile_origin, environ, cwd, GpuFacts())
    return chosen, gpu.detect(environ) if is_for_gpus(chosen.chain) else GpuFacts()


def _starts_python(selection: Selection) -> bool:
    given = [str(one.leaf.value) for one in selection.sets if one.key == "launcher"]
    return (given[-1] if given else _last(selection.chosen.chain, "launcher")) == "python"


def _last(chain: Sequence[Doc], key: str) -> str | None:
    found = [str(doc.leaves[key].value) for doc in chain if key in doc.leaves]
    return found[-1] if found else None


def _sets(request: Request) -> list[Given]:
    """Read `--set` and `--retries` as profile keys."""
    found = []
    if request.sets:
        from saferun.profile.values import read_value

        for key, text, origin in request.sets:
            found.append(Given(key, read_value(key, text, origin), origin))
    return [*found, *retries(request)]


def retries(request: Request) -> list[Given]:
    """Return what `--retries` says as profile keys."""
    if request.retries is None:
        return []
    attempts = request.retries + 1
    total = max(attempts, settings.build({}).retry.attempts_total)
    return [
        Given("retry.attempts", Leaf(attempts), "--retries"),
        Given("retry.attempts_total", Leaf(total), "--retries"),
    ]


def _facts(
    launcher: torchrun_install.Launcher | None,
    environ: Mapping[str, str],
    gpus: GpuFacts,
    starting: bool,
) -> Facts:
    if launcher is None:
        return Facts(gpu=gpus, python=_python(environ, starting))
    version = torchrun_install.torch_version(launcher, environ) if launcher.interpreter else None
    return Facts(gpu=gpus, torch=version, launcher=launcher.argv)


def _launcher(environ: Mapping[str, str], starting: bool) -> torchrun_install.Launcher:
    try:
        return torchrun_install.find_launcher(environ)
    except UnavailableError:
        if starting:
            raise
        return torchrun_install.Launcher(("torchrun",), None)


def _python(environ: Mapping[str, str], starting: bool) -> str:
    """The `python` that the user's PATH finds, as a shell would."""
    programs = (p for name in ("python", "python3") for p in paths.on_path(name, environ))
    found = next(programs, None)
    if found is None and starting:
        raise UnavailableError("there is no python on PATH", fix="put one there")
    return found or "python"


def _identity(runs: str, starting: bool) -> Identity:
    """Name this run and the directory of its receipts; a plan that is only shown has neither."""
    site = os.path.join(paths.PACKAGE, "inject", "site")
    if not starting:
        return Identity(site=site)
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return Identity(site, run, receipts=os.path.join(runs, run, "receipts"))
