"""Pure: the variables that saferun sets for its own work in an attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.inject import contract
from saferun.model import Changes, HookSettings, Identity, LaunchOptions, Profile, Setting, as_tree
from saferun.profile.schema import KEYS

# torchrun's restarts hang without it: the restarted workers meet stale keys in the agent's store.
SHARE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# torchrun dies of SIGUSR1 and SIGUSR2 and orphans its workers, unless it is told to handle them;
# a torchrun that has no such option yet does not read the variable.
HANDLED = "PET_SIGNALS_TO_HANDLE"
HANDLED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
ATTEMPT, MITIGATIONS = "SAFERUN_ATTEMPT", "SAFERUN_MITIGATIONS"
# What only makes sense for an attempt that saferun itself starts.
OF_ATTEMPT = (ATTEMPT, MITIGATIONS, HANDLED)


def for_torchrun(
    profile: Profile,
    options: LaunchOptions,
    identity: Identity,
    environ: Mapping[str, str],
    mitigations: Sequence[str],
) -> dict[str, Setting]:
    """Return what torchrun and the script are told of the attempt.

    Args:
        profile: for the launcher, and whether the attempt is supervised.
        options: of torchrun, as given.
        identity: which attempt it is.
        environ: what the user exported.
        mitigations: names of those in force.
    """
    torchrun = profile.launcher == "torchrun"
    found: dict[str, Setting] = {}
    if torchrun and options.restarts > 0 and SHARE_STORE not in environ:
        why = "--max-restarts is given: restarted workers hang in the agent's store without it"
        source = "https://github.com/pytorch/pytorch/issues/135712"
        found[SHARE_STORE] = Setting("1", "saferun", why, source)
    if profile.settings.retry.attempts == 1:
        return found
    found[ATTEMPT] = Setting(str(identity.attempt), "saferun", "which attempt of the run this is")
    found[MITIGATIONS] = Setting(",".join(mitigations), "saferun", "the mitigations in force")
    if torchrun and not options.handles_signals:
        why = "SIGUSR1 and SIGUSR2 would kill torchrun and leave its workers behind"
        found[HANDLED] = Setting(HANDLED_SIGNALS, "saferun", why)
    return found


def for_hooks(
    hooks: HookSettings,
    env: Mapping[str, Setting],
    environ: Mapping[str, str],
    identity: Identity,
    changes: Changes,
) -> dict[str, Setting]:
    """Return the two variables that carry the hooks into the job; none where no hook acts.

    Args:
        hooks: their settings.
        env: what the profile sets.
        environ: what the user exported.
        identity: the run and attempt, and where the hooks lie.
        changes: of the mitigations in force.
    """
    if not changes.needs_hooks and not any_hook(hooks):
        return {}
    text = contract.encode(
        run=identity.run,
        attempt=identity.attempt,
        hooks=as_tree(hooks),
        mitigations=changes.names,
        receipts=identity.receipts,
    )
    base = env["PYTHONPATH"].value if "PYTHONPATH" in env else environ.get("PYTHONPATH")
    others = [path for path in (base or "").split(":") if path != identity.site] if base else []
    why = "puts saferun's sitecustomize in front, in every Python of the job"
    return {
        contract.VARIABLE: Setting(text, "saferun", "tells the hooks their settings"),
        "PYTHONPATH": Setting(":".join([identity.site, *others]), "saferun", why),
    }


def any_hook(hooks: HookSettings) -> bool:
    """Return whether any hook does anything under these settings."""
    return _any(hooks, "hooks")


def _any(section: tuple[object, ...], prefix: str) -> bool:
    names: tuple[str, ...] = section._fields  # type: ignore[attr-defined]  # a NamedTuple
    for name, value in zip(names, section, strict=True):
        key = f"{prefix}.{name}"
        if isinstance(value, tuple):
            if _any(value, key):
                return True
        elif key != "hooks.required" and _acts(key, value):
            return True
    return False


def _acts(key: str, value: object) -> bool:
    """Whether a setting makes a hook act: one that can be kept out is idle at `keep` or `off`."""
    spec = KEYS[key]
    idle = "keep" if "keep" in spec.choices else "off"
    return value is True or (spec.kind == "choice" and value != idle)
