"""The settings of each hook: their types and their defaults.

The keys and defaults are those of `hooks.*` in profile/schema.py; a test compares the two. A hook
reads `context.hooks["init"]["barrier"]`, so that a misspelt key is a type error.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing is not imported where a job has not done so
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Literal, TypedDict

    KeepOrOff = Literal["keep", "off"]
    WhenDistributed = Literal["keep", "off", "off-when-distributed"]
    OnOrOff = Literal["on", "off"]

    class CompileSettings(TypedDict):
        """hooks.compile"""

        enabled: KeepOrOff
        autotune: KeepOrOff
        cudagraphs: WhenDistributed
        fallback: OnOrOff

    class InitSettings(TypedDict):
        """hooks.init"""

        set_device: bool
        barrier: Literal["store", "collective", "off"]
        agree: Literal["error", "warn", "off"]
        timeout_s: float

    class OrderSettings(TypedDict):
        """hooks.order"""

        mode: Literal["warn", "error", "fix", "off"]
        wrap_barrier: bool

    class GuardsSettings(TypedDict):
        """hooks.guards"""

        labels: OnOrOff
        logits: OnOrOff
        embeddings: OnOrOff
        compiled: OnOrOff

    class MemorySettings(TypedDict):
        """hooks.memory"""

        clear_between_trials: bool

    class OptunaSettings(TypedDict):
        """hooks.optuna"""

        mode: OnOrOff
        recycle_every: int

    class TensorflowSettings(TypedDict):
        """hooks.tensorflow"""

        cross_device_ops: Literal["keep", "hierarchical-copy"]
        memory_growth: bool

    class HookSettings(TypedDict):
        """The section `hooks` of a profile, as far as a hook implements it."""

        compile: CompileSettings
        cudagraph_markers: WhenDistributed
        excepthook: OnOrOff
        guards: GuardsSettings
        init: InitSettings | None  # None: torch is left as it is
        memory: MemorySettings
        optuna: OptunaSettings
        order: OrderSettings | None  # None: torch is left as it is
        shards: Literal["warn", "error", "off"]
        tensorflow: TensorflowSettings
        required: bool


INIT: InitSettings = {"set_device": True, "barrier": "store", "agree": "error", "timeout_s": 600.0}
ORDER: OrderSettings = {"mode": "warn", "wrap_barrier": True}
DEFAULTS: HookSettings = {
    "compile": {"enabled": "keep", "autotune": "keep", "cudagraphs": "keep", "fallback": "off"},
    "cudagraph_markers": "keep",
    "excepthook": "on",
    "guards": {"labels": "off", "logits": "off", "embeddings": "off", "compiled": "off"},
    "init": INIT,
    "memory": {"clear_between_trials": False},
    "optuna": {"mode": "off", "recycle_every": 50},
    "order": ORDER,
    "shards": "warn",
    "tensorflow": {"cross_device_ops": "keep", "memory_growth": False},
    "required": False,
}


def complete(hooks: Mapping[str, Any]) -> HookSettings:
    """Return the contract's `hooks` with a default for each key that it lacks.

    `init` and `order` are None where the contract does not name them. Unknown keys are left out.
    """
    found: Any = {
        "compile": _group(DEFAULTS["compile"], hooks.get("compile") or {}),
        "guards": _group(DEFAULTS["guards"], hooks.get("guards") or {}),
        "tensorflow": _group(DEFAULTS["tensorflow"], hooks.get("tensorflow") or {}),
        "init": _group(INIT, hooks["init"]) if hooks.get("init") else None,
        "memory": _group(DEFAULTS["memory"], hooks.get("memory") or {}),
        "optuna": _group(DEFAULTS["optuna"], hooks.get("optuna") or {}),
        "order": _group(ORDER, hooks["order"]) if hooks.get("order") else None,
    }
    found.update(_group({k: v for k, v in DEFAULTS.items() if k not in found}, hooks))
    settings: HookSettings = found
    return settings


def _group(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    # YAML makes booleans of `on` and `off`: such a value of a choice is text again here.
    words: dict[object, str] = {True: "on", False: "off"}
    group = {}
    for key, default in defaults.items():
        value = given.get(key, default)
        is_word = isinstance(value, bool) and isinstance(default, str)
        group[key] = words[value] if is_word else value
    return group
