"""Ask the world what a plan needs to know, then have it computed.

This is where words, files, variables and the machine come together; nothing is decided here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from saferun.audit import collect
from saferun.errors import UnavailableError, UsageError
from saferun.knowledge.torchrun_options import TABLE_TORCH
from saferun.model import Facts, GpuFacts, Identity, LaunchPlan, Option, Profile, Request
from saferun.plan import mitigation_overlay, torchrun_args, torchrun_install
from saferun.plan.build import bare_plan, build_plan, conditions
from saferun.profile import files as profiles
from saferun.profile.merge import Given, resolve
from saferun.profile.schema import KEYS, Doc, Leaf
from saferun.system import gpus as gpu
from saferun.system import paths

COMMAND_OPTIONS = {"--json": None}  # own options that only `saferun plan` has


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

    def plan(
        self,
        mitigations: Sequence[str] = (),
        changes: mitigation_overlay.Changes = mitigation_overlay.NONE,
    ) -> LaunchPlan:
        """Compute the plan of the attempt that `identity` names.

        Args:
            mitigations: the mitigations in force.
            changes: what they change.

        Raises:
            UsageError: words that this launcher cannot take.
        """
        if self.profile is None:
            return bare_plan(self.request, self.facts)
        plan = build_plan(
            self.request,
            self.profile,
            self.facts,
            self.environ,
            self.identity,
            mitigations,
            changes,
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


def _gather(request: Request, environ: Mapping[str, str], cwd: str, *, starting: bool) -> Gathered:
    if disabled(environ):
        facts = Facts(launcher=_launcher(environ, starting).argv)
        return Gathered(request, None, facts, environ, Identity(""))
    chosen, sets, gpus = choose(request, environ, cwd)
    return assemble(request, chosen, sets, gpus, environ, cwd, starting=starting)


def choose(
    request: Request, environ: Mapping[str, str], cwd: str
) -> tuple[profiles.Chosen, tuple[Given, ...], GpuFacts]:
    """Return the profile that a request means, the user's settings over it, and the GPUs.

    Raises:
        ProfileError: unknown, unreadable or wrong.
    """
    chosen, gpus = _choose(request, environ, cwd)
    return chosen, tuple(_sets(request)), gpus


def assemble(
    request: Request,
    chosen: profiles.Chosen,
    sets: Sequence[Given],
    gpus: GpuFacts,
    environ: Mapping[str, str],
    cwd: str,
    *,
    starting: bool,
) -> Gathered:
    """Return what plans are computed from, where the profile is known already.

    Raises:
        SaferunError: values that exclude each other, or a torchrun that is not there.
    """
    launcher_set = next((g.leaf.value for g in reversed(sets) if g.key == "launcher"), None)
    kind = launcher_set or _last(chosen.chain, "launcher") or "torchrun"
    launcher = None if kind == "python" else _launcher(environ, starting)
    facts = _facts(launcher, environ, gpus, starting)
    starts_all = chosen.named and _last(chosen.chain, "torchrun.nproc-per-node") is not None
    profile = resolve(
        chosen.chain,
        sets,
        conditions(request, facts, environ, starts_all=starts_all),
        named=chosen.named,
        origin=chosen.origin,
    )
    runs = os.path.join(cwd, request.run_dir or os.path.join(paths.state_dir(environ), "runs"))
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


def read(words: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read the user's words, with the installed torch's help where our table is not enough.

    Raises:
        UsageError: what saferun itself cannot take; torchrun's own complaints are in
            `line.refusal`.
    """
    return _request(_parse(words, environ, torchrun_args.OWN), environ)


def read_torchrun(words: Sequence[str], environ: Mapping[str, str]) -> Request:
    """Read words that are torchrun's alone; our options come from the environment only."""
    return _request(_parse(words, environ, {}), environ)


def _parse(
    words: Sequence[str], environ: Mapping[str, str], own: Mapping[str, str | None]
) -> torchrun_args.Parsed:
    parsed = torchrun_args.parse(words, own=own)
    # an abbreviation is ambiguous by the options of the torch that reads it, script's own included
    if not parsed.unsure and not any(word.startswith("--") for word in parsed.line.script_args):
        return parsed
    options = _installed_options(environ)
    return parsed if options is None else torchrun_args.parse(words, options=options, own=own)


def read_command(words: Sequence[str], environ: Mapping[str, str]) -> tuple[bool, Request]:
    """Read the words after `saferun plan`: those of a launch, and --json before the script."""
    own = {**torchrun_args.OWN, **COMMAND_OPTIONS}
    parsed = _parse(words, environ, own)
    return any(name == "--json" for name, _ in parsed.own), _request(parsed, environ)


def _installed_options(environ: Mapping[str, str]) -> Sequence[Option] | None:
    """The options of the installed torch, where it is another one than our table describes."""
    try:
        launcher = torchrun_install.find_launcher(environ)
    except UnavailableError:
        return None
    version = torchrun_install.torch_version(launcher, environ)
    if version is not None and ".".join(version.split(".")[:2]) == TABLE_TORCH:
        return None
    return torchrun_install.option_table(launcher, version, paths.cache_dir(environ))


def _request(parsed: torchrun_args.Parsed, environ: Mapping[str, str]) -> Request:
    given = dict(parsed.own)  # the last one counts, as everywhere
    profile, origin = given.get("--profile"), "--profile"
    if profile is None:
        profile, origin = environ.get("SAFERUN_PROFILE") or None, "SAFERUN_PROFILE"
    sets = [(*_pair(text, "SAFERUN_SET"), "SAFERUN_SET") for text in _exported_sets(environ)]
    sets += [(*_pair(text, "--set"), "--set") for name, text in parsed.own if name == "--set"]
    return Request(
        line=parsed.line,
        profile=profile,
        profile_origin=origin if profile else "",
        sets=tuple(sets),
        retries=_retries(given, environ),
        run_dir=given.get("--run-dir") or environ.get("SAFERUN_RUN_DIR") or None,
        dry_run="--dry-run" in given or environ.get("SAFERUN_DRY_RUN", "") not in ("", "0"),
    )


def _exported_sets(environ: Mapping[str, str]) -> list[str]:
    """SAFERUN_SET holds KEY=VALUE words, quoted as in a shell where they hold blanks."""
    text = environ.get("SAFERUN_SET", "")
    if not text:
        return []
    import shlex

    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"SAFERUN_SET cannot be read: {error}",
            fix="write KEY=VALUE words, quoted as in a shell",
        ) from None


def _pair(text: str, origin: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"{origin} takes KEY=VALUE, not `{text}`", fix="such as retry.attempts=1")
    return key, value


def _retries(given: Mapping[str, str], environ: Mapping[str, str]) -> int | None:
    origin = "--retries" if "--retries" in given else "SAFERUN_RETRIES"
    text = given.get("--retries") or environ.get("SAFERUN_RETRIES") or ""
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{origin} takes a whole number, not `{text}`", fix="0 is no retry")
    return int(text)


def _choose(
    request: Request, environ: Mapping[str, str], cwd: str
) -> tuple[profiles.Chosen, GpuFacts]:
    """Choose the profile; GPUs are asked for once, and not at all where the profile is for none."""
    if not request.profile and not os.path.exists(os.path.join(cwd, profiles.LOCAL)):
        gpus = gpu.detect(environ)
        return profiles.choose(None, "", environ, cwd, gpus), gpus
    chosen = profiles.choose(request.profile, request.profile_origin, environ, cwd, GpuFacts())
    for_gpus = any(doc.match or doc.name == "cuda" for doc in chosen.chain)
    return chosen, gpu.detect(environ) if for_gpus else GpuFacts()


def _last(chain: Sequence[Doc], key: str) -> str | None:
    found = [doc.leaves[key].value for doc in chain if key in doc.leaves]
    return found[-1] if found else None


def _sets(request: Request) -> list[Given]:
    """Read `--set` and `--retries` as profile keys."""
    found = []
    if request.sets:
        from saferun.profile import yaml_reader

        for key, value, origin in request.sets:
            found.append(Given(key, yaml_reader.parse_value(key, value, origin), origin))
    return [*found, *retries(request)]


def retries(request: Request) -> list[Given]:
    """Return what `--retries` says as profile keys."""
    if request.retries is None:
        return []
    attempts = request.retries + 1
    total = max(attempts, KEYS["retry.attempts_total"].default)
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
