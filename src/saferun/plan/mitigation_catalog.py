"""Pure: the cures of knowledge/mitigations.yaml as values, and in words.

    parse(knowledge.load_mitigations(environ)) -> {name: Cure}
    describe(cures, names) -> "port (a free port; cost: none)"

cures.py tells where one can be used and what it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from saferun.errors import SaferunError
from saferun.profile.schema import KEYS, is_range, nearest

CUDAGRAPHS = "cudagraphs"  # what a cure may exclude beside other cures
# Questions that remedies.py answers, as the data writes them.
FREE_PORT, FRESH_ID, OPEN_FILES = "free", "fresh", "open-files"
COMPUTED = ("fresh-directory", "newest-ptxas", "reachable-interface", "=reachable-interface")
_TORCHRUN = {"master-port": FREE_PORT, "rdzv-endpoint": FREE_PORT, "rdzv-id": FRESH_ID}
_PROCESS = ("nofile", "session", "ignore")
_FILE = "knowledge/mitigations.yaml"


class Cure(NamedTuple):
    """One entry of mitigations.yaml."""

    name: str
    cost: str  # in words
    why: str
    source: str
    env: Mapping[str, str] = {}
    computed: Mapping[str, str] = {}  # variable -> the question that gives its value
    hooks: Mapping[str, Mapping[str, Any]] = {}
    assign: Mapping[str, Any] = {}  # settings of torch without a variable, made in the rank
    rank_directories: bool = False  # the hook makes each rank's own of the computed directory
    torchrun: Mapping[str, str] = {}  # option -> "free" or "fresh"
    process: Mapping[str, Any] = {}  # nofile, session, ignore
    cost_percent: float | None = None  # of the throughput, where it was measured
    excludes: tuple[str, ...] = ()  # cures in force, or "cudagraphs", beside which it is not used
    torch: str = ""  # a range; "" is every torch that saferun supports
    last: bool = False  # only for the one attempt that is to tell the reason

    @property
    def needs_hooks(self) -> bool:
        """Whether it does its work inside the ranks."""
        return bool(self.hooks or self.assign or self.rank_directories)

    @property
    def settings(self) -> list[tuple[str, Any]]:
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


def parse(document: Mapping[str, Any]) -> Mapping[str, Cure]:
    """Return the cures of mitigations.yaml's `mitigations`, checked.

    Raises:
        SaferunError: an unknown key, a wrong type, a value that nothing understands.
    """
    cures = {name: _cure(name, body) for name, body in document.items()}
    for cure in cures.values():
        for other in cure.excludes:
            _check(
                other == CUDAGRAPHS or other in cures, cure.name, f"excludes `{other}`, no cure", ""
            )
    return cures


def _check(holds: bool, name: str, what: str, mend: str) -> None:
    if not holds:
        raise SaferunError(f"cure {name}: {what}", where=_FILE, mend=mend)


def _cure(name: str, body: Any) -> Cure:
    _check(isinstance(body, Mapping), name, "is no mapping", "")
    known = [field for field in Cure._fields if field != "name"]
    for key in body:
        _check(key in known, name, f"unknown key `{key}`", nearest(str(key), known))
    for key in ("cost", "why", "source"):
        _check(isinstance(body.get(key), str) and bool(body[key]), name, f"has no `{key}`", "")
    for key in ("env", "computed", "hooks", "assign", "torchrun", "process"):
        _check(isinstance(body.get(key, {}), Mapping), name, f"`{key}` is no mapping", "")
    cure = Cure(name=name, **{**body, "excludes": tuple(body.get("excludes", ()))})
    _check_values(cure)
    _check_hooks(cure)
    return cure


def _check_values(cure: Cure) -> None:
    for variable, value in cure.env.items():
        mend = "quote it: YAML makes numbers and booleans of bare words"
        _check(isinstance(value, str), cure.name, f"{variable} is no text", mend)
    for variable, question in cure.computed.items():
        what = f"{variable}: nothing answers `{question}`"
        _check(question in COMPUTED, cure.name, what, nearest(str(question), COMPUTED))
    for option, value in cure.torchrun.items():
        what = f"torchrun: --{option} cannot be `{value}`"
        _check(_TORCHRUN.get(option) == value, cure.name, what, f"known are {_TORCHRUN}")
    for key in cure.process:
        _check(key in _PROCESS, cure.name, f"process: unknown key `{key}`", nearest(key, _PROCESS))
    percent = cure.cost_percent
    fits = percent is None or (isinstance(percent, int | float) and 0 <= percent <= 100)
    _check(fits, cure.name, "cost_percent is no share of 100", "")
    ranged = isinstance(cure.torch, str) and (not cure.torch or is_range(cure.torch))
    _check(ranged, cure.name, f"torch: `{cure.torch}` is no range", 'such as ">=2.8,<2.10"')
    for flag in (cure.last, cure.rank_directories):
        _check(isinstance(flag, bool), cure.name, "a flag is neither true nor false", "")


def _check_hooks(cure: Cure) -> None:
    for key, value in cure.settings:
        _check(key in KEYS, cure.name, f"unknown setting {key}", nearest(key, KEYS))
        spec = KEYS[key]
        fits = value in spec.choices if spec.kind == "choice" else isinstance(value, bool)
        _check(fits, cure.name, f"{key} cannot be {value!r}", f"known: {spec.choices}")


def describe(cures: Mapping[str, Cure], names: Iterable[str]) -> str:
    """Return one clause per cure: what it sets, and what that costs."""
    return "; ".join(_described(cures[name]) for name in names if name in cures)


_TOLD = {
    FREE_PORT: "a free port",
    FRESH_ID: "a fresh rendezvous id",
    "fresh-directory": "fresh directories for compile caches",
    "newest-ptxas": "the newest ptxas here",
    "reachable-interface": "the interface that reaches the others",
}


def _described(cure: Cure) -> str:
    sets = [f"{key.removeprefix('hooks.')}={value}" for key, value in cure.settings]
    sets += [f"{key.removeprefix('torch.')}={value}" for key, value in cure.assign.items()]
    if not sets:  # the variables are then the hooks' own, for processes that no hook reaches
        sets = [f"{name}={value}" for name, value in cure.env.items()]
    asked = [*cure.computed.values(), *cure.torchrun.values()]
    sets += [_TOLD[question] for question in dict.fromkeys(q.lstrip("=") for q in asked)]
    sets += [_told_process(key, value) for key, value in cure.process.items()]
    percent = cure.cost_percent
    cost = f"{percent:g} % of the throughput" if percent else cure.cost
    return f"{cure.name} ({', '.join(sets)}; cost: {cost})"


def _told_process(key: str, value: Any) -> str:
    if key == "nofile":
        return f"up to {value} open files"
    return f"a {value} session" if key == "session" else f"{' '.join(value)} ignored"
