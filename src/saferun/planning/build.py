"""Pure: build one LaunchPlan from the request, the profile and what is known of the machine.

    build_plan(request, profile, facts, environ, identity, changes) -> LaunchPlan

`build_plan` reads no clock, no file and no environment of its own. A retry is the same call with
another identity and other changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from saferun.errors import UsageError
from saferun.model import (
    NO_CHANGES,
    Changes,
    CommandLine,
    Identity,
    LaunchOptions,
    LaunchPlan,
    MachineFacts,
    Profile,
    Request,
)
from saferun.planning import env_merge, own_variables, resume
from saferun.planning.mitigation_overlay import merge_mitigations, with_options
from saferun.planning.other_launchers import hint
from saferun.planning.own_variables import is_supervised
from saferun.planning.torchrun.torchrun_args import launch_options, value_of, whole
from saferun.profile.merge import Conditions
from saferun.settings import Settings, with_values

# Options of the rendezvous with other nodes; --standalone contradicts each of them.
_RENDEZVOUS = ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "nnodes")
_DESTS = {"m": "module", "t": "tee", "r": "redirects"}  # names of torchrun's one-letter options


def conditions(
    request: Request, facts: MachineFacts, *, named: bool, starts_all: bool
) -> Conditions:
    """Return the conditions against which `when:` clauses are evaluated.

    Args:
        request: the user's request.
        facts: the torch version and the GPUs of this machine.
        named: the user named the profile.
        starts_all: the profile starts one process per GPU if the user gives no count.

    Returns:
        The torch version, the number of visible GPUs, whether more than one rank will run, and
        whether the profile was named.
    """
    gpus = len(facts.gpu.gpus)
    nodes, count = request.options.nodes, request.options.processes
    if count is None:
        several = starts_all and gpus > 1 and nodes == 1
    elif (number := whole(count)) is not None:
        several = number > 1
    else:
        several = count == "cpu" or gpus > 1
    # An --nnodes that gives no single number (1:4) may mean several nodes.
    return Conditions(facts.torch, gpus, several or (nodes or 2) > 1, named)


def build_plan(
    request: Request,
    profile: Profile,
    facts: MachineFacts,
    environ: Mapping[str, str],
    identity: Identity,
    changes: Changes = NO_CHANGES,
) -> LaunchPlan:
    """Return the plan of one attempt: the command, the environment and the policies.

    Args:
        request: the user's request; `request.line.refusal` must be None.
        profile: resolved for these facts.
        facts: the facts about the machine that runs the job.
        environ: the variables that the user exported.
        identity: the attempt, and the place where its processes find saferun's files.
        changes: the changes of the mitigations in force; they override everything else.

    Raises:
        UsageError: an option of torchrun is given, and the launcher is plain python.
    """
    line = _line(request, profile, environ, identity)
    options, merged = launch_options(line, environ), env_merge.merge(profile.env, environ)
    settings = profile.settings._replace(
        hooks=with_values(profile.settings.hooks, changes.hooks, "hooks.")
    )
    # SAFERUN_INJECT and PYTHONPATH also load the code by which the agents of several nodes meet.
    needs_hooks = changes.needs_hooks or (options.nodes != 1 and is_supervised(settings))
    seen = {**environ, **{name: setting.value for name, setting in merged.env.items()}}
    ours = {
        **own_variables.for_torchrun(settings, options, identity, environ, changes.names),
        **own_variables.for_hooks(
            settings, identity, changes.names, seen.get("PYTHONPATH", ""), needed=needs_hooks
        ),
        **own_variables.for_watch(settings, identity, seen),
    }
    env = merge_mitigations({**merged.env, **ours}, environ, changes.env)
    args = with_options(line, changes.torchrun)
    return LaunchPlan(
        profile=profile.name,
        launcher=settings.launcher,
        command=_command(line, options, profile, facts, args),
        torchrun_args=args,
        script=line.script,
        script_args=line.script_args,
        options=options,
        env=dict(sorted(env.items())),
        settings=settings,
        mitigations=changes.names,
        profile_origin=profile.origin,
        gpus=facts.gpu,
        notes={**profile.notes, **changes.notes},
        kept=merged.kept,
        hint=_hint(request, profile, facts),
        remarks=(*_remarks(request, profile, facts), *merged.remarks),
        limits=changes.limits,
        checkpoint=identity.checkpoint,
    )


def disabled_plan(request: Request, facts: MachineFacts) -> LaunchPlan:
    """Return the plan under SAFERUN_DISABLE: torchrun as the user wrote it, without additions."""
    return LaunchPlan(
        profile="none",
        launcher="torchrun",
        command=(*facts.launcher, *request.line.args),
        torchrun_args=request.line.args,
        script=request.line.script,
        script_args=request.line.script_args,
        options=request.options,
        env={},
        settings=Settings(),
        mitigations=(),
        profile_origin="SAFERUN_DISABLE",
        gpus=facts.gpu,
        notes={},
        kept={},
        disabled=True,
    )


def _line(
    request: Request, profile: Profile, environ: Mapping[str, str], identity: Identity
) -> CommandLine:
    """Return the attempt's command line: profile defaults, user's and resume arguments."""
    line, retry = request.line, profile.settings.retry
    defaults = _defaults(line, profile, environ)
    script_args = line.script_args
    if identity.checkpoint is not None:
        script_args = resume.arguments(script_args, retry.resume, identity.checkpoint, environ)
    script_args = (*script_args, *(retry.resume_args if identity.attempt > 1 else ()))
    own = line.args[: len(line.args) - len(line.script_args)]
    return line._replace(
        args=(*(argument for argument, _, _ in defaults), *own, *script_args),
        given={**{dest: value for _, dest, value in defaults}, **line.given},
        script_args=script_args,
    )


def _defaults(
    line: CommandLine, profile: Profile, environ: Mapping[str, str]
) -> list[tuple[str, str, str]]:
    """Return the profile's torchrun options that apply: (argument, name in torchrun, value)."""
    if profile.settings.launcher != "torchrun" or not profile.named:
        return []
    found = []
    for name, default in profile.torchrun.items():
        dest = _DESTS.get(name, name.replace("-", "_"))
        if value_of(line, environ, dest) is not None or not _applies(dest, line, environ):
            continue
        if default.value == "true":
            found.append((f"--{name}", dest, ""))
        elif default.value != "false":
            found.append((f"--{name}={default.value}", dest, default.value))
    return found


def _applies(dest: str, line: CommandLine, environ: Mapping[str, str]) -> bool:
    """Return whether a default of the profile is compatible with the options that were given."""
    if dest == "nproc_per_node":
        return launch_options(line, environ).nodes == 1
    if dest == "standalone":
        return all(value_of(line, environ, given) is None for given in _RENDEZVOUS)
    return True


def _command(
    line: CommandLine,
    options: LaunchOptions,
    profile: Profile,
    facts: MachineFacts,
    args: tuple[str, ...],
) -> tuple[str, ...]:
    if profile.settings.launcher == "torchrun":
        return (*facts.launcher, *args)
    if options.foreign:
        option = "--" + options.foreign[0].replace("_", "-")
        raise UsageError(
            f"{option} is torchrun's, and launcher: python starts plain python",
            where=f"profile {profile.name}, or --set",
            fix=f"leave {option} out, or add --set launcher=torchrun",
        )
    if line.script is None:
        raise _without_script(line)
    if options.no_python:
        return (line.script, *line.script_args)
    way = ("-m",) if options.module else ("-c",) if options.code else ()
    return (facts.python, *way, line.script, *line.script_args)


def _without_script(line: CommandLine) -> UsageError:
    unknown = (line.refusal or "").removeprefix("unrecognized arguments: ").split()
    if line.refusal and line.refusal.startswith("unrecognized") and unknown:
        return UsageError(
            f"there is no option {unknown[0]}",
            where="before the script; launcher: python",
            fix="an option of python's own goes into a variable, as PYTHONUNBUFFERED=1 for -u",
        )
    what = line.refusal or ""
    if not what or what.startswith("the following arguments are required"):
        what = "no script is given"
    return UsageError(what, where="launcher: python", fix="saferun [OPTIONS] SCRIPT [ARGS]...")


def _hint(request: Request, profile: Profile, facts: MachineFacts) -> str:
    """Return what naming the detected profile would change; "" if it would change nothing."""
    count = len(facts.gpu.gpus)
    if profile.named or count < 2 or "nproc-per-node" not in profile.torchrun:
        return ""
    if request.options.processes is not None or request.options.nodes != 1:
        return ""
    return f"{count} GPUs and one process: --profile {profile.name} starts one on each"


def _remarks(request: Request, profile: Profile, facts: MachineFacts) -> list[str]:
    remarks = [facts.gpu.warning] if facts.gpu.warning else []
    if not (request.options.no_python or request.options.module):
        remarks += filter(None, [hint(request.line.script)])
    attempts, restarts = profile.settings.retry.attempts, request.options.restarts
    if attempts > 1 and restarts > 0 and profile.settings.launcher == "torchrun":
        remarks.append(
            f"--max-restarts {restarts} stays torchrun's own, within each of saferun's up to "
            f"{attempts} attempts (retry.attempts)"
        )
    return remarks
