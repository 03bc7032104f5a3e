"""Pure: everything that is known makes one LaunchPlan.

    plan(request, profile, facts, environ, mitigations) -> LaunchPlan

reads no clock, no file and no environment of its own; a retry is the same call again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saferun.errors import UsageError
from saferun.inject import contract
from saferun.model import (
    CommandLine,
    Facts,
    Identity,
    LaunchPlan,
    Profile,
    Request,
    Setting,
)
from saferun.plan import env_merge, mitigation_overlay
from saferun.plan.torchrun_args import max_nodes, max_restarts, setting
from saferun.profile.merge import Conditions
from saferun.profile.schema import KEYS, Key

# torchrun's restarts hang without it: the restarted workers meet stale keys in the agent's store.
SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# torchrun dies of SIGUSR1 and SIGUSR2 and orphans its workers, unless it is told to handle them;
# a torchrun that has no such option yet does not read the variable.
HANDLED = "PET_SIGNALS_TO_HANDLE"
HANDLED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
ATTEMPT, MITIGATIONS = "SAFERUN_ATTEMPT", "SAFERUN_MITIGATIONS"
# What only makes sense for an attempt that saferun itself starts.
OF_ATTEMPT = (ATTEMPT, MITIGATIONS, HANDLED)
# Keys that are read and checked, and that nothing acts on yet: a launch says so.
NOT_YET = (
    "retry.rejoin_s",
    "locks.slot_memory_gib",
    "watch.",
    "workers",
    "hooks.shards",
    "hooks.guards.",
    "hooks.memory.",
    "hooks.optuna.",
    "hooks.tensorflow.",
)
# Options that say where and as what this node meets the others.
_MEETING = ("rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "nnodes")


def conditions(
    request: Request, facts: Facts, environ: Mapping[str, str], *, starts_all: bool
) -> Conditions:
    """Return what `when:` clauses are decided by.

    Args:
        request: the user's words.
        facts: the machine's.
        environ: for `PET_*`.
        starts_all: the profile starts one process per GPU where no count is given.
    """
    gpus = len(facts.gpu.gpus)
    nodes = max_nodes(request.line, environ)
    count = setting(request.line, environ, "nproc_per_node")
    if count is None:
        several = starts_all and gpus > 1 and nodes == 1
    elif count.isdigit():
        several = int(count) > 1
    else:
        several = count == "cpu" or gpus > 1
    return Conditions(facts.torch, gpus, several or (nodes or 2) > 1)


def build_plan(
    request: Request,
    profile: Profile,
    facts: Facts,
    environ: Mapping[str, str],
    identity: Identity,
    mitigations: Sequence[str] = (),
    changes: mitigation_overlay.Changes = mitigation_overlay.NONE,
) -> LaunchPlan:
    """Return the plan of one attempt.

    Args:
        request: the user's words; `request.line.refusal` must be None.
        profile: resolved for these facts.
        facts: where the job will run.
        environ: what the user exported.
        identity: which attempt this is, and where its processes find our files.
        mitigations: mitigations chosen so far, in order.
        changes: what they change, from `mitigations.changes`; it beats everything else.

    Raises:
        UsageError: words that this launcher cannot take.
    """
    retry = profile.sections["retry"]
    line = _resumed(request.line, retry["resume_args"]) if identity.attempt > 1 else request.line
    args = mitigation_overlay.with_words(
        _torchrun_args(line, profile, environ), line, changes.torchrun
    )
    command = _command(line, profile, facts, args)
    hooks = mitigation_overlay.over_hooks(profile.sections["hooks"], changes.hooks)
    merged = env_merge.merge(profile.env, environ)
    ours = {
        **_store_setting(line, profile, environ),
        **_attempt_settings(line, profile, environ, identity, mitigations),
        **_injection(
            hooks, profile, environ, merged.env, identity, mitigations, changes.needs_hooks
        ),
    }
    policy = {
        key: value
        for key, value in profile.sections.items()
        if key not in ("hooks", "retry", "locks")
    }
    return LaunchPlan(
        profile=profile.name,
        launcher=profile.launcher,
        command=command,
        torchrun_args=args,
        script=line.script,
        script_args=line.script_args,
        env=dict(
            sorted(mitigation_overlay.over({**merged.env, **ours}, environ, changes.env).items())
        ),
        hooks=hooks,
        retry=retry,
        locks={**profile.sections["locks"], "devices": [g.uuid for g in facts.gpu.gpus if g.uuid]},
        mitigations=tuple(mitigations),
        policy=policy,
        profile_origin=profile.origin,
        gpus=facts.gpu,
        notes={**profile.notes, **changes.notes},
        kept=merged.kept,
        hint=_hint(line, profile, facts, environ),
        remarks=(*_remarks(line, profile, facts, environ), *merged.remarks),
        limits=changes.limits,
    )


def bare_plan(request: Request, facts: Facts) -> LaunchPlan:
    """Return the plan of SAFERUN_DISABLE: torchrun as the user wrote it, and nothing of ours."""
    return LaunchPlan(
        profile="none",
        launcher="torchrun",
        command=(*facts.launcher, *request.line.args),
        torchrun_args=request.line.args,
        script=request.line.script,
        script_args=request.line.script_args,
        env={},
        hooks={},
        retry={},
        locks={},
        mitigations=(),
        policy={},
        profile_origin="SAFERUN_DISABLE",
        gpus=facts.gpu,
        notes={},
        kept={},
    )


def _torchrun_args(
    line: CommandLine, profile: Profile, environ: Mapping[str, str]
) -> tuple[str, ...]:
    """The profile's defaults where the user gave none, then the user's own words."""
    if profile.launcher != "torchrun" or not profile.named:
        return line.args
    defaults = []
    for name, default in profile.torchrun.items():
        dest = name.replace("-", "_")
        dest = {"m": "module", "t": "tee", "r": "redirects"}.get(dest, dest)
        if setting(line, environ, dest) is not None or not _applies(dest, line, environ):
            continue
        if default.value == "true":
            defaults.append(f"--{name}")
        elif default.value != "false":
            defaults.append(f"--{name}={default.value}")
    return (*defaults, *line.args)


def _applies(dest: str, line: CommandLine, environ: Mapping[str, str]) -> bool:
    """Whether a default makes sense beside what the user gave."""
    if dest == "nproc_per_node":
        return max_nodes(line, environ) == 1
    if dest == "standalone":
        return all(setting(line, environ, given) is None for given in _MEETING)
    return True


def _command(
    line: CommandLine, profile: Profile, facts: Facts, args: tuple[str, ...]
) -> tuple[str, ...]:
    if profile.launcher == "torchrun":
        return (*facts.launcher, *args)
    foreign = sorted(set(line.given) - {"module", "no_python"})
    if foreign:
        option = "--" + foreign[0].replace("_", "-")
        raise UsageError(
            f"{option} is torchrun's, and profile {profile.name} starts plain python",
            where=f"launcher: python ({profile.origin})",
            fix=f"leave {option} out, or add --set launcher=torchrun",
        )
    script = () if line.script is None else (line.script,)
    if "no_python" in line.given:
        return (*script, *line.script_args)
    module = ("-m",) if "module" in line.given else ()
    return (facts.python, *module, *script, *line.script_args)


def _resumed(line: CommandLine, resume_args: Sequence[str]) -> CommandLine:
    """The words of a later attempt: what makes the script resume, after its own arguments."""
    return line._replace(
        args=(*line.args, *resume_args), script_args=(*line.script_args, *resume_args)
    )


def _attempt_settings(
    line: CommandLine,
    profile: Profile,
    environ: Mapping[str, str],
    identity: Identity,
    mitigations: Sequence[str],
) -> dict[str, Setting]:
    """What an attempt under supervision is told: which one it is, and to pass on every signal."""
    if profile.sections["retry"]["attempts"] == 1:
        return {}
    settings = {
        ATTEMPT: Setting(str(identity.attempt), "saferun", "which attempt of the run this is"),
        MITIGATIONS: Setting(",".join(mitigations), "saferun", "the mitigations in force"),
    }
    if profile.launcher == "torchrun" and setting(line, environ, "signals_to_handle") is None:
        why = "SIGUSR1 and SIGUSR2 would kill torchrun and leave its workers behind"
        settings[HANDLED] = Setting(HANDLED_SIGNALS, "saferun", why)
    return settings


def _store_setting(
    line: CommandLine, profile: Profile, environ: Mapping[str, str]
) -> dict[str, Setting]:
    """torchrun's own restarts only work when workers do not share the agent's store."""
    wanted = profile.launcher == "torchrun" and max_restarts(line, environ) > 0
    if not wanted or SHARE_STORE in environ:
        return {}
    return {
        SHARE_STORE: Setting(
            "1",
            "saferun",
            "--max-restarts is given: restarted workers hang in the agent's store without it",
            "https://github.com/pytorch/pytorch/issues/135712",
        )
    }


def _injection(
    hooks: Mapping[str, Any],
    profile: Profile,
    environ: Mapping[str, str],
    env: Mapping[str, Setting],
    identity: Identity,
    mitigations: Sequence[str],
    needed: bool,
) -> dict[str, Setting]:
    """The two variables that carry the hooks into the job; none where no hook does anything."""
    if not needed and not any_hook(hooks):
        return {}
    text = contract.encode(
        run=identity.run,
        attempt=identity.attempt,
        hooks=hooks,
        mitigations=mitigations,
        receipts=identity.receipts,
    )
    base = env["PYTHONPATH"].value if "PYTHONPATH" in env else environ.get("PYTHONPATH")
    others = [p for p in (base or "").split(":") if p != identity.site] if base else []
    why = "puts saferun's sitecustomize in front, in every Python of the job"
    return {
        contract.VARIABLE: Setting(text, "saferun", "tells the hooks their settings"),
        "PYTHONPATH": Setting(":".join([identity.site, *others]), "saferun", why),
    }


def any_hook(hooks: Mapping[str, Any], prefix: str = "hooks") -> bool:
    """Return whether any hook does anything under these settings."""
    for name, value in hooks.items():
        key = f"{prefix}.{name}"
        if isinstance(value, Mapping):
            if any_hook(value, key):
                return True
        elif key != "hooks.required" and _acts(KEYS[key], value):
            return True
    return False


def _acts(spec: Key, value: Any) -> bool:
    """A hook that can be kept out of the way is idle at `keep`, the others at `off`."""
    idle = "keep" if "keep" in spec.choices else "off"
    return value is True or (spec.kind == "choice" and value != idle)


def _hint(line: CommandLine, profile: Profile, facts: Facts, environ: Mapping[str, str]) -> str:
    """What naming a detected profile would change, where it would change anything."""
    count = len(facts.gpu.gpus)
    if profile.named or count < 2 or "nproc-per-node" not in profile.torchrun:
        return ""
    if setting(line, environ, "nproc_per_node") is not None or max_nodes(line, environ) != 1:
        return ""
    return f"{count} GPUs and one process: --profile {profile.name} starts one on each"


def _remarks(
    line: CommandLine, profile: Profile, facts: Facts, environ: Mapping[str, str]
) -> list[str]:
    remarks = [facts.gpu.warning] if facts.gpu.warning else []
    attempts, restarts = profile.sections["retry"]["attempts"], max_restarts(line, environ)
    if attempts > 1 and restarts > 0 and profile.launcher == "torchrun":
        remarks.append(
            f"--max-restarts {restarts} stays torchrun's own, within each of saferun's up to "
            f"{attempts} attempts (retry.attempts)"
        )
    idle = [
        key
        for key, note in profile.notes.items()
        if key.startswith(NOT_YET) and note.value != str(KEYS[key].default)
    ]
    if idle:
        remarks.append(f"asked for, and not in this version: {', '.join(sorted(idle))}")
    return remarks
