"""Pure: the environment variables that saferun itself needs in an attempt."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from saferun.inject import contract
from saferun.model import (
    Changes,
    HookSettings,
    Identity,
    LaunchOptions,
    Profile,
    Setting,
    Settings,
    as_tree,
)
from saferun.profile.schema import KEYS

# Without it, a restart hangs: the restarted workers find stale keys in the agent's store.
SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ATTEMPT, MITIGATIONS = "SAFERUN_ATTEMPT", "SAFERUN_MITIGATIONS"
WORKER = "SAFERUN_WORKER"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Of torch's flight recorder for NCCL: what follows them is the rank.
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # torch 2.8 on, and before
# Set only in attempts that saferun supervises; `saferun env` leaves them out.
OF_ATTEMPT = (ATTEMPT, MITIGATIONS, WORKER)


def is_supervised(settings: Settings) -> bool:
    """Return whether saferun stays beside the job; otherwise the job replaces it by exec."""
    return settings.retry.attempts > 1 or bool(needed_beside(settings))


def needed_beside(settings: Settings) -> tuple[str, ...]:
    """Return the keys, with their values, that need saferun beside the job of a single attempt."""
    watch = zip(settings.watch._fields, settings.watch, strict=True)
    found = [f"watch.{name}: end" for name, value in watch if value == "end"]
    if settings.watch.silence_s is not None and settings.watch.mode == "warn":
        found.append(f"watch.silence_s: {settings.watch.silence_s:g}")
    found += ["notify.command"] if settings.notify.command else []
    found += [f"workers: {settings.workers}"] if settings.workers > 1 else []
    found += ["hooks.optuna.mode: on"] if settings.hooks.optuna.mode == "on" else []
    found += ["recover.gpu_reset: when-idle"] if settings.recover.gpu_reset == "when-idle" else []
    return tuple(found)


def for_torchrun(
    profile: Profile,
    options: LaunchOptions,
    identity: Identity,
    environ: Mapping[str, str],
    mitigations: Sequence[str],
) -> dict[str, Setting]:
    """Return the variables for torchrun and the script.

    Args:
        profile: gives the launcher, and whether the attempt is supervised.
        options: of torchrun, as given.
        identity: which attempt it is.
        environ: what the user exported.
        mitigations: names of those in force.

    Returns:
        Settings by variable; an exported value of the restart variable is not overridden.
    """
    torchrun = profile.launcher == "torchrun"
    found: dict[str, Setting] = {}
    if torchrun and options.restarts > 0 and SHARE_STORE not in environ:
        why = "--max-restarts is given: restarted workers hang in the agent's store without it"
        source = "https://github.com/pytorch/pytorch/issues/135712"
        found[SHARE_STORE] = Setting("1", "saferun", why, source)
    if not is_supervised(profile.settings):
        return found
    found[ATTEMPT] = Setting(str(identity.attempt), "saferun", "which attempt of the run this is")
    found[MITIGATIONS] = Setting(",".join(mitigations), "saferun", "the mitigations in force")
    if not torchrun:
        found.update(_for_worker(identity, profile.settings.workers))
    return found


def _for_worker(identity: Identity, workers: int) -> dict[str, Setting]:
    if identity.worker is None and workers > 1:
        return {}  # the plan of all of them
    found = {WORKER: Setting(str(identity.worker or 0), "saferun", "which worker this is")}
    if identity.visible is not None:
        why = "one GPU for each of several workers"
        found[VISIBLE] = Setting(identity.visible, "saferun", why)
    return found


def for_hooks(
    hooks: HookSettings,
    env: Mapping[str, Setting],
    environ: Mapping[str, str],
    identity: Identity,
    changes: Changes,
    watched: bool,
    start: str,
) -> dict[str, Setting]:
    """Return the two variables that load the hooks in the job; none if no hook is active.

    Args:
        hooks: their settings.
        env: what the profile sets.
        environ: what the user exported.
        identity: the run and attempt, and the directory of sitecustomize.py.
        changes: what the mitigations in force change.
        watched: a watch may ask the ranks where they are.
        start: what the attempt goes on from, and how; "" for nothing.

    Returns:
        Settings for SAFERUN_INJECT and PYTHONPATH.
    """
    if not changes.needs_hooks and not any_hook(hooks):
        return {}
    text = contract.encode(
        run=identity.run,
        attempt=identity.attempt,
        hooks=as_tree(hooks),
        mitigations=changes.names,
        receipts=identity.receipts,
        state=identity.state,
        previous=identity.previous,
        watch=1 if watched else None,
        start=start or None,
    )
    base = env["PYTHONPATH"].value if "PYTHONPATH" in env else environ.get("PYTHONPATH")
    others = [path for path in (base or "").split(":") if path != identity.site] if base else []
    why = "puts saferun's sitecustomize first in every Python process of the job"
    return {
        contract.VARIABLE: Setting(text, "saferun", "the settings of the hooks"),
        "PYTHONPATH": Setting(":".join([identity.site, *others]), "saferun", why),
    }


def for_watch(profile: Profile, identity: Identity, given: Container[str]) -> dict[str, Setting]:
    """Return where the watch asks for the dumps of torch's flight recorder, and finds them.

    Args:
        profile: resolved.
        identity: the run and attempt.
        given: what the user or the profile sets; the watch uses that.
    """
    watches = profile.settings.watch.mode != "off" and is_supervised(profile.settings)
    if not watches or identity.flight is None:
        return {}
    base = f"{identity.flight}/rank-"
    found = {}
    if PIPE not in given:
        found[PIPE] = Setting(base, "saferun", "the watch asks for the last collectives there")
    if not any(name in given for name in DUMPS):
        why = "where a rank puts its last collectives"
        found.update({name: Setting(base, "saferun", why) for name in DUMPS})
    return found


def any_hook(hooks: HookSettings) -> bool:
    """Return whether any hook is active under these settings."""
    return _any(hooks, "hooks")


def _any(section: tuple[object, ...], prefix: str) -> bool:
    names: tuple[str, ...] = section._fields  # type: ignore[attr-defined]  # a NamedTuple's
    for name, value in zip(names, section, strict=True):
        key = f"{prefix}.{name}"
        if isinstance(value, tuple):
            if _any(value, key):
                return True
        elif key != "hooks.required" and _acts(key, value):
            return True
    return False


def _acts(key: str, value: object) -> bool:
    """Return whether a setting makes a hook active; `keep`, else `off`, is the inactive choice."""
    spec = KEYS[key]
    idle = "keep" if "keep" in spec.choices else "off"
    return value is True or (spec.kind == "choice" and value != idle)
