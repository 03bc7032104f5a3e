"""The settings of a profile, each declared once: its type, default, meaning and unit.

Each class is a group of keys, and each field is a key or a group: `retry` of Settings is a
RetryPolicy, whose field `attempts` is `retry.attempts` in a profile and for `--set`. A key is
declared with `choice`, `flag`, …, and its field has the key's default.

These declarations determine parsing and its messages, the JSON Schema, `saferun help`, the tables
in the documents and what the hooks of a rank read. A rank has no defaults of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

Group = TypeVar("Group")

# The values of keys: text, boolean, number, null, a list of texts, a pair of numbers.
Value = str | bool | int | float | None | tuple[str, ...] | tuple[float, float]


class Key(NamedTuple):
    """One profile key. `kind`: choice, bool, int, number, text, texts or range."""

    kind: str
    default: Value
    doc: str
    choices: tuple[str, ...] = ()
    nullable: bool = False
    least: float | None = None  # smallest value allowed
    unit: str = ""


# These return Any, as dataclasses.field does: a type checker takes the field's own type.


def choice(words: str, doc: str) -> Any:
    """Declare a key that takes one of several words, as in "off|warn"; the first is the default."""
    choices = tuple(words.split("|"))
    return Key("choice", choices[0], doc, choices)


def flag(default: bool, doc: str) -> Any:
    """Declare a key that is true or false."""
    return Key("bool", default, doc)


def whole(default: int, doc: str, *, least: int) -> Any:
    """Declare a key that takes a whole number.

    Args:
        default: the value if none is given.
        doc: what the key means.
        least: the smallest value allowed.
    """
    return Key("int", default, doc, least=least)


def number(default: float | None, doc: str, *, least: float = 0, unit: str = "") -> Any:
    """Declare a key that takes a number, or null if that is the default.

    Args:
        default: the value if none is given.
        doc: what the key means.
        least: the smallest value allowed.
        unit: the number's unit.
    """
    return Key("number", default, doc, nullable=default is None, least=least, unit=unit)


def pair(default: tuple[float, float], doc: str, *, unit: str) -> Any:
    """Declare a key that takes two numbers, the smaller one first.

    Args:
        default: the values if none are given.
        doc: what the key means.
        unit: the unit of both numbers.
    """
    return Key("range", default, doc, least=0, unit=unit)


def text(doc: str) -> Any:
    """Declare a key that takes a text; it is empty by default."""
    return Key("text", "", doc)


def texts(doc: str, *choices: str) -> Any:
    """Declare a key that takes a list of texts, or of the given choices; it is empty by default."""
    return Key("texts", (), doc, choices)


_KEYS: dict[type, dict[str, Key]] = {}  # by group, then by field


def group(kind: type[Group]) -> type[Group]:
    """Store the keys that a class declares, and make their defaults the defaults of its fields."""
    declared: dict[str, Any] = kind._field_defaults  # type: ignore[attr-defined]  # a NamedTuple's
    _KEYS[kind] = {name: key for name, key in declared.items() if isinstance(key, Key)}
    _replace_defaults(kind, {name: key.default for name, key in _KEYS[kind].items()})
    return kind


def _replace_defaults(kind: type, values: Mapping[str, object]) -> None:
    """Give fields of a NamedTuple other defaults than those in its class body.

    A NamedTuple keeps its defaults twice: `_field_defaults` for readers, and the defaults of
    `__new__`, which a call takes. A class made anew would do, too, but a type checker reads the
    body, and at a launch each further class costs 0.1 ms.
    """
    defaults = kind._field_defaults  # type: ignore[attr-defined]
    defaults.update(values)
    kind.__new__.__defaults__ = tuple(defaults.values())


# --- the hooks -----------------------------------------------------------------------------------


@group
class CompileHook(NamedTuple):
    """`hooks.compile`: what torch.compile may do."""

    enabled: str = choice(
        "keep|off", "Whether torch.compile compiles, as the script asks, or does nothing."
    )
    autotune: str = choice(
        "keep|off", "Whether kernels are benchmarked against each other when first built."
    )
    cudagraphs: str = choice(
        "keep|off|off-when-distributed", "Whether inductor may record CUDA graphs."
    )
    fallback: str = choice("off|on", "Run a frame eagerly where its compilation fails.")


@group
class InitHook(NamedTuple):
    """`hooks.init`: what init_process_group checks and waits for."""

    set_device: bool = flag(
        True, "Choose the GPU of LOCAL_RANK before the process group is made, if none is chosen."
    )
    barrier: str = choice("store|collective|off", "How ranks wait for each other after init.")
    agree: str = choice(
        "error|warn|off",
        "What happens when ranks differ in versions, GPU type or the step they train from.",
    )
    timeout_s: float = number(
        600.0,
        "How long ranks wait for each other at init before missing ones are named.",
        least=1,
        unit="s",
    )


@group
class OrderHook(NamedTuple):
    """`hooks.order`: what happens when things are made before the process group."""

    mode: str = choice("warn|error|fix|off", "What happens when things are made before the group.")
    wrap_barrier: bool = flag(True, "Ranks wait for each other after DDP/FSDP wrapping.")


@group
class GuardsHook(NamedTuple):
    """`hooks.guards`: checks before a kernel whose failure makes the CUDA context unusable."""

    labels: str = choice("off|on", "Check class labels before the loss kernel.")
    logits: str = choice("off|on", "Check the shape of logits before the loss.")
    embeddings: str = choice("off|on", "Check indices before an embedding.")


@group
class MemoryHook(NamedTuple):
    """`hooks.memory`: when the cache of the CUDA allocator is cleared."""

    clear_between_trials: bool = flag(
        False, "Clear the allocator's cache before and after garbage collection between trials."
    )


@group
class OptunaHook(NamedTuple):
    """`hooks.optuna`: how a study continues after CUDA errors."""

    mode: str = choice("off|on", "Keep a study going through CUDA errors.")
    recycle_every: int = whole(
        50,
        "Successful trials after which the process is replaced by a new one; 0 is never.",
        least=0,
    )


@group
class TensorflowHook(NamedTuple):
    """`hooks.tensorflow`: how MirroredStrategy reduces gradients, and how memory is allocated."""

    cross_device_ops: str = choice(
        "keep|hierarchical-copy", "How MirroredStrategy adds gradients up."
    )
    memory_growth: bool = flag(
        False, "TensorFlow takes GPU memory as it needs it, not all at once."
    )


@group
class HookSettings(NamedTuple):
    """The `hooks` section: one field for each hook."""

    compile: CompileHook = CompileHook()
    cudagraph_markers: str = choice(
        "keep|off|off-when-distributed",
        "Whether torch.compiler.cudagraph_mark_step_begin has an effect.",
    )
    init: InitHook = InitHook()
    excepthook: str = choice(
        "on|off", "Record the first exception of each rank where torchrun looks for it."
    )
    order: OrderHook = OrderHook()
    shards: str = choice("warn|error|off", "What happens when ranks read the same data.")
    guards: GuardsHook = GuardsHook()
    memory: MemoryHook = MemoryHook()
    optuna: OptunaHook = OptunaHook()
    tensorflow: TensorflowHook = TensorflowHook()
    required: bool = flag(False, "End the job where a hook cannot be put in place.")


# --- the policies of a run -----------------------------------------------------------------------


@group
class ResumePolicy(NamedTuple):
    """`retry.resume`: how an attempt after the first goes on from a checkpoint."""

    checkpoints: str = text(
        "Where the job's checkpoints are: a glob, in which {--option} has its value."
    )
    args: tuple[str, ...] = texts(
        "The script's arguments to go on from {checkpoint} or {step}, if there is one."
    )


@group
class RetryPolicy(NamedTuple):
    """The `retry` section."""

    attempts: int = whole(
        3, "Attempts in a row without progress; 1: the job replaces saferun (exec).", least=1
    )
    attempts_total: int = whole(10, "Attempts in total, with or without progress.", least=1)
    backoff_s: tuple[float, float] = pair(
        (5.0, 60.0), "First and longest wait between attempts.", unit="s"
    )
    deadline_s: float | None = number(
        None, "No attempt starts later than this after the first.", unit="s"
    )
    unknown_after_s: float | None = number(
        None,
        "An unrecognised failure is retried once if the attempt lived longer than this.",
        unit="s",
    )
    rejoin_s: float = number(
        60.0, "How long a node waits, after a failure, for the other nodes to come back.", unit="s"
    )
    debug_last: bool = flag(False, "Make the last attempt one that collects diagnostics.")
    resume_args: tuple[str, ...] = texts("Added to the script's arguments from attempt 2 on.")
    resume: ResumePolicy = ResumePolicy()


@group
class StartPolicy(NamedTuple):
    """The `start` section."""

    ranks: str = choice(
        "spawn|warm",
        "Whether each rank is a new Python, or a fork of one that has imported torch; under "
        "`launcher: python`: whether a process that replaces another one has imported ahead.",
    )


@group
class MitigationPolicy(NamedTuple):
    """The `mitigate` section."""

    enabled: bool = flag(True, "Change settings after a failure that has a mitigation.")
    remember: bool = flag(True, "Start with a mitigation that helped this script before.")
    never: tuple[str, ...] = texts("Names of mitigations that are not to be used.")


@group
class PreflightPolicy(NamedTuple):
    """The `preflight` section."""

    mode: str = choice("off|warn|require", "Try every GPU before the job starts.")
    timeout_s: float = number(20.0, "How long that may take.", least=0.1, unit="s")
    history: str = choice(
        "warn|refuse|off",
        "Name a GPU or host that failed in two of its last five runs; with mode require, "
        "refuse to start on it.",
    )


@group
class LockPolicy(NamedTuple):
    """The `locks` section."""

    gpus: str = choice("warn|refuse|wait|off", "What happens when another run has the GPUs.")
    wait_s: float = number(0.0, "How long `wait` waits.", unit="s")
    slots: int = whole(1, "Runs, or workers of runs, that may share one GPU.", least=1)
    slot_memory_gib: float | None = number(
        None, "GPU memory that must be free for a slot.", unit="GiB"
    )


@group
class WatchPolicy(NamedTuple):
    """The `watch` section."""

    mode: str = choice(
        "warn|end|off",
        "Say where each rank is when the job shows no sign of work for too long; end it then.",
    )
    silence_s: float | None = number(
        None,
        "How long that is; by default ten times the job's longest gap, 10 min or more.",
        least=1,
        unit="s",
    )
    loss: str = choice(
        "warn|end|off",
        "Say when the loss that the job prints is not a number any more; end the attempt then.",
    )


@group
class NotifyPolicy(NamedTuple):
    """The `notify` section."""

    command: tuple[str, ...] = texts(
        "A command, no shell, that gets each event of `on` as JSON on its stdin."
    )
    on: tuple[str, ...] = texts(
        "The events that it gets: all of them where none is named.",
        *("failed", "mitigated", "hang", "loss", "finished"),
    )


@group
class RecoverPolicy(NamedTuple):
    """The `recover` section."""

    gpu_reset: str = choice("never|when-idle", "Whether an idle GPU may be reset.")


@group
class Settings(NamedTuple):
    """All profile keys except those of the open sections `env` and `torchrun`."""

    launcher: str = choice("torchrun|python", "What starts the script. Takes no `when`.")
    hooks: HookSettings = HookSettings()
    retry: RetryPolicy = RetryPolicy()
    mitigate: MitigationPolicy = MitigationPolicy()
    preflight: PreflightPolicy = PreflightPolicy()
    start: StartPolicy = StartPolicy()
    locks: LockPolicy = LockPolicy()
    workers: int = whole(1, "Processes to start (launcher: python only).", least=1)
    watch: WatchPolicy = WatchPolicy()
    notify: NotifyPolicy = NotifyPolicy()
    price_per_gpu_hour: float | None = number(
        None, "What a GPU costs for an hour, in any currency: `saferun runs report` adds it up."
    )
    recover: RecoverPolicy = RecoverPolicy()


# --- by dotted name ------------------------------------------------------------------------------


def leaves(settings: Any, prefix: str = "") -> Iterator[tuple[str, Key, Value]]:
    """Yield the dotted name, the declaration and the value of each key, in their order.

    Args:
        settings: a group of keys.
        prefix: prefix of the group's names: "hooks.".
    """
    for field, value in settings._asdict().items():
        if key := _KEYS[type(settings)].get(field):
            yield prefix + field, key, value
        else:
            yield from leaves(value, f"{prefix}{field}.")


KEYS: dict[str, Key] = {name: key for name, key, _ in leaves(Settings())}


def with_values(settings: Group, values: Mapping[str, Any], prefix: str = "") -> Group:
    """Return settings with other values for some keys.

    Args:
        settings: a group of keys, such as Settings(), which has the defaults.
        values: new values by dotted name; names outside the group are ignored.
        prefix: prefix of the group's names: "hooks.".
    """
    found = {}
    for field, value in settings._asdict().items():  # type: ignore[attr-defined]  # a NamedTuple
        name = prefix + field
        if field in _KEYS[type(settings)]:
            found[field] = values.get(name, value)
        else:
            found[field] = with_values(value, values, f"{name}.")
    return type(settings)(**found)
