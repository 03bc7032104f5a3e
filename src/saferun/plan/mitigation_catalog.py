"""Pure: the mitigations of knowledge/mitigations.yaml as values, and in words.

    parse(knowledge.load_mitigations(environ)) -> {name: Mitigation}
    describe(mitigations, names) -> "port (a free port; cost: none)"

mitigation_catalog.py tells where one can be used and what it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from saferun.errors import SaferunError
from saferun.model import ProcessLimits
from saferun.named_tuple import NamedTuple
from saferun.profile.schema import KEYS, is_range, nearest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CUDAGRAPHS = "cudagraphs"  # what a mitigation may exclude beside other mitigations
# Questions that supervise/probes.py answers, as the data writes them.
FREE_PORT, FRESH_ID, OPEN_FILES = "free", "fresh", "open-files"
COMPUTED = ("fresh-directory", "newest-ptxas", "reachable-interface", "=reachable-interface")
_TORCHRUN = {"master-port": FREE_PORT, "rdzv-endpoint": FREE_PORT, "rdzv-id": FRESH_ID}
_FILE = "knowledge/mitigations.yaml"


class Mitigation(NamedTuple):
    """One entry of mitigations.yaml."""

    name: str
    cost: str  # in words
    why: str
    source: str
    env: Mapping[str, str] = {}
    computed: Mapping[str, str] = {}  # variable -> the question that gives its value
    hooks: Mapping[str, Mapping[str, str | bool]] = {}
    assign: Mapping[
        str, str | bool | int
    ] = {}  # settings of torch without a variable, made in the rank
    rank_directories: bool = False  # the hook makes each rank's own of the computed directory
    torchrun: Mapping[str, str] = {}  # option -> "free" or "fresh"
    process: ProcessLimits = ProcessLimits()
    cost_percent: float | None = None  # of the throughput, where it was measured
    excludes: tuple[
        str, ...
    ] = ()  # mitigations in force, or "cudagraphs", beside which it is not used
    torch: str = ""  # a range; "" is every torch that saferun supports
    last: bool = False  # only for the one attempt that is to tell the reason

    @property
    def needs_hooks(self) -> bool:
        """Whether it does its work inside the ranks."""
        return bool(self.hooks or self.assign or self.rank_directories)

    @property
    def settings(self) -> list[tuple[str, str | bool]]:
        """The hooks' settings by their keys: hooks.compile.autotune."""
        return [
            (f"hooks.{h}.{key}", v) for h, part in self.hooks.items() for key, v in part.items()
        ]

    @property
    def costs(self) -> bool:
        """Whether it takes something from every run that has it."""
        return not self.cost.startswith("none")

    @property
    def lasting(self) -> bool:
        """Whether what it cures belongs to the script and the machine, not to the moment.

        A port that was taken once is no reason to avoid it for good.
        """
        return not (self.last or self.torchrun or self.rank_directories)


def parse(document: Mapping[str, Any]) -> Mapping[str, Mitigation]:
    """Return the mitigations of mitigations.yaml's `mitigations`, checked.

    Raises:
        SaferunError: an unknown key, a wrong type, a value that nothing understands.
    """
    mitigations = {name: _mitigation(name, body) for name, body in document.items()}
    for mitigation in mitigations.values():
        for other in mitigation.excludes:
            _check(
                other == CUDAGRAPHS or other in mitigations,
                mitigation.name,
                f"excludes `{other}`, no mitigation",
                "",
            )
    return mitigations


def _check(holds: bool, name: str, what: str, fix: str) -> None:
    if not holds:
        raise SaferunError(f"mitigation {name}: {what}", where=_FILE, fix=fix)


def _mitigation(name: str, body: Any) -> Mitigation:
    _check(isinstance(body, Mapping), name, "is no mapping", "")
    known = [field for field in Mitigation._fields if field != "name"]
    for key in body:
        _check(key in known, name, f"unknown key `{key}`", nearest(str(key), known))
    for key in ("cost", "why", "source"):
        _check(isinstance(body.get(key), str) and bool(body[key]), name, f"has no `{key}`", "")
    for key in ("env", "computed", "hooks", "assign", "torchrun", "process"):
        _check(isinstance(body.get(key, {}), Mapping), name, f"`{key}` is no mapping", "")
    limits = body.get("process", {})
    for key in limits:
        what = f"process: unknown key `{key}`"
        _check(key in ProcessLimits._fields, name, what, nearest(key, ProcessLimits._fields))
    process = ProcessLimits(**{**limits, "ignore": tuple(limits.get("ignore", ()))})
    excludes = tuple(body.get("excludes", ()))
    mitigation = Mitigation(name=name, **{**body, "excludes": excludes, "process": process})
    _check_values(mitigation)
    _check_hooks(mitigation)
    return mitigation


def _check_values(mitigation: Mitigation) -> None:
    for variable, value in mitigation.env.items():
        fix = "quote it: YAML makes numbers and booleans of bare words"
        _check(isinstance(value, str), mitigation.name, f"{variable} is no text", fix)
    for variable, question in mitigation.computed.items():
        what = f"{variable}: nothing answers `{question}`"
        _check(question in COMPUTED, mitigation.name, what, nearest(str(question), COMPUTED))
    for option, value in mitigation.torchrun.items():
        what = f"torchrun: --{option} cannot be `{value}`"
        _check(_TORCHRUN.get(option) == value, mitigation.name, what, f"known are {_TORCHRUN}")
    percent = mitigation.cost_percent
    fits = percent is None or (isinstance(percent, int | float) and 0 <= percent <= 100)
    _check(fits, mitigation.name, "cost_percent is no share of 100", "")
    ranged = isinstance(mitigation.torch, str) and (
        not mitigation.torch or is_range(mitigation.torch)
    )
    _check(
        ranged, mitigation.name, f"torch: `{mitigation.torch}` is no range", 'such as ">=2.8,<2.10"'
    )
    for flag in (mitigation.last, mitigation.rank_directories):
        _check(isinstance(flag, bool), mitigation.name, "a flag is neither true nor false", "")


def _check_hooks(mitigation: Mitigation) -> None:
    for key, value in mitigation.settings:
        _check(key in KEYS, mitigation.name, f"unknown setting {key}", nearest(key, KEYS))
        spec = KEYS[key]
        fits = value in spec.choices if spec.kind == "choice" else isinstance(value, bool)
        _check(fits, mitigation.name, f"{key} cannot be {value!r}", f"known: {spec.choices}")


def describe(mitigations: Mapping[str, Mitigation], names: Iterable[str]) -> str:
    """Return one clause per mitigation: what it sets, and what that costs."""
    return "; ".join(_described(mitigations[name]) for name in names if name in mitigations)


_ANSWERS = {
    FREE_PORT: "a free port",
    FRESH_ID: "a fresh rendezvous id",
    "fresh-directory": "fresh directories for compile caches",
    "newest-ptxas": "the newest ptxas here",
    "reachable-interface": "the interface that reaches the others",
}


def _described(mitigation: Mitigation) -> str:
    sets = [f"{key.removeprefix('hooks.')}={value}" for key, value in mitigation.settings]
    sets += [f"{key.removeprefix('torch.')}={value}" for key, value in mitigation.assign.items()]
    if not sets:  # the variables are then the hooks' own, for processes that no hook reaches
        sets = [f"{name}={value}" for name, value in mitigation.env.items()]
    asked = [*mitigation.computed.values(), *mitigation.torchrun.values()]
    sets += [_ANSWERS[question] for question in dict.fromkeys(q.lstrip("=") for q in asked)]
    sets += _process_limits(mitigation.process)
    percent = mitigation.cost_percent
    cost = f"{percent:g} % of the throughput" if percent else mitigation.cost
    return f"{mitigation.name} ({', '.join(sets)}; cost: {cost})"


def _process_limits(limits: ProcessLimits) -> list[str]:
    found = [] if limits.nofile is None else [f"up to {limits.nofile} open files"]
    found += [f"a {limits.session} session"] if limits.session else []
    return found + ([f"{' '.join(limits.ignore)} ignored"] if limits.ignore else [])
