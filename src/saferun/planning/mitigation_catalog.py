"""The mitigations of knowledge/mitigations.yaml as typed values and as text; pure, but for `load`.

    load() -> {name: Mitigation}
    describe(mitigations, names) -> "port (a free port; cost: none)"

mitigation_overlay.py decides whether a mitigation can be used and what it changes in a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saferun.inject.targets import NEEDS, NEEDS_ASSIGN, NEEDS_DIRECTORIES
from saferun.knowledge import loader
from saferun.model import ProcessLimits

CUDAGRAPHS = "cudagraphs"  # the only value of `excludes` that is not a mitigation
# Names in mitigations.yaml of values that supervise/changes/probes.py determines.
FREE_PORT, FRESH_ID = "free", "fresh"
LIMITS = {"nofile": "open-files", "nproc": "processes"}  # field of ProcessLimits -> its question


class Mitigation(NamedTuple):
    """One entry of mitigations.yaml."""

    name: str
    cost: str  # a phrase for people
    why: str
    source: str
    env: Mapping[str, str] = {}
    computed: Mapping[str, str] = {}  # variable -> name of the probe that determines its value
    settings: Mapping[str, str | bool] = {}  # "hooks.compile.autotune" -> value
    # Settings of torch that have no environment variable; a hook assigns them in the rank.
    assign: Mapping[str, str | bool | int] = {}
    # Whether a hook gives each rank its own directory below the computed one.
    rank_directories: bool = False
    torchrun: Mapping[str, str] = {}  # option -> "free" or "fresh"
    process: ProcessLimits = ProcessLimits()
    cost_percent: float | None = None  # measured loss of throughput; None if not measured
    excludes: tuple[str, ...] = ()  # mitigations (or "cudagraphs") that it excludes
    torch: str = ""  # version range; "" for every torch that saferun supports
    nccl: str = ""  # version range of NCCL
    last: bool = False  # used only in the last attempt, which collects diagnostics

    @property
    def needs_hooks(self) -> bool:
        """Return whether a hook inside the ranks has to apply the mitigation."""
        return bool(self.settings or self.assign or self.rank_directories)

    @property
    def targets(self) -> set[str]:
        """Return the modules of torch whose hooks must be in place."""
        found = [NEEDS.get(key.removeprefix("hooks."), ()) for key in self.settings]
        found += [NEEDS_ASSIGN] * bool(self.assign) + [NEEDS_DIRECTORIES] * self.rank_directories
        return {name for names in found for name in names}

    @property
    def costs(self) -> bool:
        """Return whether the mitigation slows down or restricts every run that uses it."""
        return not self.cost.startswith("none")

    @property
    def lasting(self) -> bool:
        """Return whether the cause is permanent (script, machine): later runs need it, too.

        A port that was in use once is no reason to avoid it in later runs.
        """
        return not (self.last or self.torchrun or self.rank_directories)


def load() -> Mapping[str, Mitigation]:
    """Return what each mitigation changes and costs (knowledge/mitigations.yaml)."""
    return parse(loader.load("mitigations.yaml")["mitigations"])


def parse(document: Mapping[str, Any]) -> Mapping[str, Mitigation]:
    """Return the mitigations of a document, the `mitigations` key of mitigations.yaml.

    tests/planning/test_mitigation_catalog.py checks the shipped file; a run uses it unchecked.
    """
    return {name: _mitigation(name, body) for name, body in document.items()}


def _mitigation(name: str, body: Mapping[str, Any]) -> Mitigation:
    rest = {key: value for key, value in body.items() if key not in ("hooks", "process")}
    hooks, limits = body.get("hooks", {}), body.get("process", {})
    return Mitigation(
        name=name,
        settings={
            f"hooks.{hook}.{key}": v for hook, part in hooks.items() for key, v in part.items()
        },
        process=ProcessLimits(**{**limits, "ignore": tuple(limits.get("ignore", ()))}),
        **{**rest, "excludes": tuple(body.get("excludes", ()))},
    )


def describe(mitigations: Mapping[str, Mitigation], names: Iterable[str]) -> str:
    """Return one clause for each mitigation: what it sets, and its cost."""
    return "; ".join(_described(mitigations[name]) for name in names if name in mitigations)


_ANSWERS = {
    FREE_PORT: "a free port",
    FRESH_ID: "a fresh rendezvous id",
    "fresh-directory": "fresh directories for compile caches",
    "newest-ptxas": "the newest ptxas here",
    "reachable-interface": "the interface that reaches the others",
}


def _described(mitigation: Mitigation) -> str:
    percent = mitigation.cost_percent
    cost = f"{percent:g} % of the throughput" if percent else mitigation.cost
    return f"{mitigation.name} ({sets(mitigation)}; cost: {cost})"


def sets(mitigation: Mitigation) -> str:
    """Return what a mitigation sets, for people."""
    found = [f"{key.removeprefix('hooks.')}={value}" for key, value in mitigation.settings.items()]
    found += [f"{key.removeprefix('torch.')}={value}" for key, value in mitigation.assign.items()]
    if not found:  # otherwise the variables repeat the settings, for processes without hooks
        found = [f"{name}={value}" for name, value in mitigation.env.items()]
    probes = [*mitigation.computed.values(), *mitigation.torchrun.values()]
    found += [_ANSWERS[probe] for probe in dict.fromkeys(name.lstrip("=") for name in probes)]
    return ", ".join(found + _process_limits(mitigation.process))


def _process_limits(limits: ProcessLimits) -> list[str]:
    named = ((limits.nofile, "open files"), (limits.nproc, "processes and threads"))
    found = [f"up to {most} {what}" for most, what in named if most is not None]
    found += [f"a {limits.session} session"] if limits.session else []
    return found + ([f"{' '.join(limits.ignore)} ignored"] if limits.ignore else [])
