"""Pure: the environment variables that saferun itself needs in an attempt."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence

from saferun.inject import contract
from saferun.model import Checkpoint, Identity, LaunchOptions, Setting, as_tree
from saferun.settings import HookSettings, Key, RetryPolicy, Settings, leaves

# Without this variable a restart hangs: restarted workers find stale keys in the agent's store.
SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
ATTEMPT, MITIGATIONS = "SAFERUN_ATTEMPT", "SAFERUN_MITIGATIONS"
WORKER = "SAFERUN_WORKER"
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Variables of torch's flight recorder for NCCL, which appends the rank to their values.
PIPE = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # since torch 2.8; before
# Set only in attempts that saferun supervises; `saferun env` leaves them out.
OF_ATTEMPT = (ATTEMPT, MITIGATIONS, WORKER)


def is_supervised(settings: Settings) -> bool:
    """Return whether saferun stays beside the job; otherwise the job replaces it by exec."""
    return settings.retry.attempts > 1 or bool(needed_beside(settings))


def needed_beside(settings: Settings) -> tuple[str, ...]:
    """Return the keys (with values) that need saferun beside the job even for a single attempt."""
    watch = leaves(settings.watch, "watch.")
    found = [f"{name}: end" for name, _, value in watch if value == "end"]
    if settings.watch.silence_s is not None and settings.watch.mode == "warn":
        found.append(f"watch.silence_s: {settings.watch.silence_s:g}")
    found += ["notify.command"] if settings.notify.command else []
    found += [f"workers: {settings.workers}"] if settings.workers > 1 else []
    found += ["start.ranks: warm"] if settings.start.ranks == "warm" else []
    found += ["hooks.optuna.mode: on"] if settings.hooks.optuna.mode == "on" else []
    found += ["recover.gpu_reset: when-idle"] if settings.recover.gpu_reset == "when-idle" else []
    return tuple(found)


def for_torchrun(
    settings: Settings,
    options: LaunchOptions,
    identity: Identity,
    environ: Mapping[str, str],
    mitigations: Sequence[str],
) -> dict[str, Setting]:
    """Return the variables for torchrun and the script.

    Args:
        settings: settings that give the launcher and whether the attempt is supervised.
        options: torchrun's options, as given.
        identity: which attempt it is.
        environ: the variables that the user exported.
        mitigations: names of the mitigations in force.

    Returns:
        Settings by variable; an exported value of the restart variable is not overridden.
    """
    torchrun = settings.launcher == "torchrun"
    found: dict[str, Setting] = {}
    if torchrun and options.restarts > 0 and SHARE_STORE not in environ:
        why = "--max-restarts is given: restarted workers hang in the agent's store without it"
        source = "https://github.com/pytorch/pytorch/issues/135712"
        found[SHARE_STORE] = Setting("1", "saferun", why, source)
    if not is_supervised(settings):
        return found
    found[ATTEMPT] = Setting(str(identity.attempt), "saferun", "which attempt of the run this is")
    found[MITIGATIONS] = Setting(",".join(mitigations), "saferun", "the mitigations in force")
    if not torchrun:
        found.update(_for_worker(identity, settings.workers))
    return found


def _for_worker(identity: Identity, workers: int) -> dict[str, Setting]:
    if identity.worker is None and workers > 1:
        return {}  # this plan covers all workers
    found = {WORKER: Setting(str(identity.worker or 0), "saferun", "which worker this is")}
    if identity.visible is not None:
        why = "one GPU for each of several workers"
        found[VISIBLE] = Setting(identity.visible, "saferun", why)
    return found


def for_hooks(
    settings: Settings,
    identity: Identity,
    mitigations: Sequence[str],
    pythonpath: str,
    *,
    needed: bool,
) -> dict[str, Setting]:
    """Return the two variables that load the hooks in the job.

    Args:
        settings: the settings of the attempt.
        identity: the run and attempt, and the directory of sitecustomize.py.
        mitigations: names of the mitigations in force.
        pythonpath: PYTHONPATH as the job would have it.
        needed: load the hooks although none is active.

    Returns:
        Settings for SAFERUN_INJECT and PYTHONPATH; none if the hooks have nothing to do.
    """
    if not needed and not any_hook(settings.hooks):
        return {}
    text = contract.encode(
        run=identity.run,
        attempt=identity.attempt,
        hooks=as_tree(settings.hooks),
        mitigations=mitigations,
        receipts=identity.receipts,
        state=identity.state,
        previous=identity.previous,
        watch=None if settings.watch.mode == "off" else 1,
        imports=1 if settings.start.ranks == "warm" else None,
        start=_start(settings.retry, identity.checkpoint) or None,
    )
    others = [path for path in pythonpath.split(":") if path != identity.site] if pythonpath else []
    why = "puts saferun's sitecustomize first in every Python process of the job"
    return {
        contract.VARIABLE: Setting(text, "saferun", "the settings of the hooks"),
        "PYTHONPATH": Setting(":".join([identity.site, *others]), "saferun", why),
    }


def _start(retry: RetryPolicy, checkpoint: Checkpoint | None) -> str:
    """Return a text for the checkpoint and the way to continue that ranks compare; "" if none."""
    parts = [f"retry.resume {json.dumps(retry.resume)}"] if retry.resume.checkpoints else []
    parts += [f"retry.resume_args {json.dumps(retry.resume_args)}"] if retry.resume_args else []
    if parts:
        found = f"{checkpoint.path} (step {checkpoint.step})" if checkpoint else "the beginning"
        parts.insert(0, found)
    return ", ".join(parts)


def for_watch(settings: Settings, identity: Identity, given: Container[str]) -> dict[str, Setting]:
    """Return the variables by which the watch gets the dumps of torch's flight recorder.

    Args:
        settings: the settings of the attempt.
        identity: the run and attempt.
        given: variables that the user or the profile sets; the watch uses those.
    """
    watches = settings.watch.mode != "off" and is_supervised(settings)
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
    found = (acts(key, value) for name, key, value in leaves(hooks) if name != "required")
    return any(found)


def acts(key: Key, value: object) -> bool:
    """Return whether a setting makes a hook active; `keep`, else `off`, is inactive."""
    idle = "keep" if "keep" in key.choices else "off"
    return value is True or (key.kind == "choice" and value != idle)
