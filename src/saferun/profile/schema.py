"""Pure: the keys of a profile, as one table of type, choices, default and description.

Validation (yaml_reader.py), `--set`, the defaults of a launch and the JSON Schema for editors are
all derived from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from saferun.knowledge.torchrun_options import OPTIONS
from saferun.named_tuple import NamedTuple
from saferun.system import spelling

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


def _choice(*choices: str, doc: str) -> Key:
    return Key("choice", choices[0], doc, choices)


def _flag(default: bool, doc: str) -> Key:
    return Key("bool", default, doc)


def _int(default: int, least: int, doc: str) -> Key:
    return Key("int", default, doc, least=least)


def _seconds(default: float | None, doc: str, *, least: float = 0) -> Key:
    return Key("number", default, doc, nullable=default is None, least=least, unit="s")


KEYS: dict[str, Key] = {
    "launcher": _choice("torchrun", "python", doc="What starts the script."),
    "hooks.compile.enabled": _choice(
        "keep", "off", doc="Whether torch.compile compiles, as the script asks, or does nothing."
    ),
    "hooks.compile.autotune": _choice(
        "keep", "off", doc="Whether kernels are benchmarked against each other when first built."
    ),
    "hooks.compile.cudagraphs": _choice(
        "keep", "off", "off-when-distributed", doc="Whether inductor may record CUDA graphs."
    ),
    "hooks.compile.fallback": _choice(
        "off", "on", doc="Run a frame eagerly where its compilation fails."
    ),
    "hooks.cudagraph_markers": _choice(
        "keep",
        "off",
        "off-when-distributed",
        doc="Whether torch.compiler.cudagraph_mark_step_begin has an effect.",
    ),
    "hooks.init.set_device": _flag(
        True, "Choose the GPU of LOCAL_RANK before the process group is made, if none is chosen."
    ),
    "hooks.init.barrier": _choice(
        "store", "collective", "off", doc="How ranks wait for each other after init."
    ),
    "hooks.init.agree": _choice(
        "error",
        "warn",
        "off",
        doc="What happens when ranks differ in versions, GPU type or the step they train from.",
    ),
    "hooks.init.timeout_s": _seconds(
        600.0, "How long ranks wait for each other at init before missing ones are named.", least=1
    ),
    "hooks.excepthook": _choice(
        "on", "off", doc="Record the first exception of each rank where torchrun looks for it."
    ),
    "hooks.order.mode": _choice(
        "warn", "error", "fix", "off", doc="What happens when things are made before the group."
    ),
    "hooks.order.wrap_barrier": _flag(True, "Ranks wait for each other after DDP/FSDP wrapping."),
    "hooks.shards": _choice(
        "warn", "error", "off", doc="What happens when ranks read the same data."
    ),
    "hooks.guards.labels": _choice("off", "on", doc="Check class labels before the loss kernel."),
    "hooks.guards.logits": _choice("off", "on", doc="Check the shape of logits before the loss."),
    "hooks.guards.embeddings": _choice("off", "on", doc="Check indices before an embedding."),
    "hooks.guards.compiled": _choice("off", "on", doc="Make these checks in compiled code, too."),
    "hooks.memory.clear_between_trials": _flag(
        False, "Clear the allocator's cache before and after garbage collection between trials."
    ),
    "hooks.optuna.mode": _choice("off", "on", doc="Keep a study going through CUDA errors."),
    "hooks.optuna.recycle_every": _int(
        50, 0, "Successful trials after which the process is replaced by a new one; 0 is never."
    ),
    "hooks.tensorflow.cross_device_ops": _choice(
        "keep", "hierarchical-copy", doc="How MirroredStrategy adds gradients up."
    ),
    "hooks.tensorflow.memory_growth": _flag(
        False, "TensorFlow takes GPU memory as it needs it, not all at once."
    ),
    "hooks.required": _flag(False, "End the job where a hook cannot be put in place."),
    "retry.attempts": _int(
        3, 1, "Attempts in a row without progress; 1: the job replaces saferun (exec)."
    ),
    "retry.attempts_total": _int(10, 1, "Attempts in total, with or without progress."),
    "retry.backoff_s": Key(
        "range", (5.0, 60.0), "First and longest wait between attempts.", least=0, unit="s"
    ),
    "retry.deadline_s": _seconds(None, "No attempt starts later than this after the first."),
    "retry.unknown_after_s": _seconds(
        None, "An unrecognised failure is retried once if the attempt lived longer than this."
    ),
    "retry.rejoin_s": _seconds(
        60.0, "How long a node waits, after a failure, for the other nodes to come back."
    ),
    "retry.debug_last": _flag(False, "Make the last attempt one that collects diagnostics."),
    "retry.resume_args": Key("texts", (), "Added to the script's arguments from attempt 2 on."),
    "retry.resume.checkpoints": Key(
        "text", "", "Where the job's checkpoints are: a glob, in which {--option} has its value."
    ),
    "retry.resume.args": Key(
        "texts", (), "The script's arguments to go on from {checkpoint} or {step}, if there is one."
    ),
    "mitigate.enabled": _flag(True, "Change settings after a failure that has a mitigation."),
    "mitigate.remember": _flag(True, "Start with a mitigation that helped this script before."),
    "mitigate.never": Key("texts", (), "Names of mitigations that are not to be used."),
    "preflight.mode": _choice("off", "warn", "require", doc="Try every GPU before the job starts."),
    "preflight.timeout_s": _seconds(20.0, "How long that may take.", least=0.1),
    "locks.gpus": _choice(
        "warn", "refuse", "wait", "off", doc="What happens when another run has the GPUs."
    ),
    "locks.wait_s": _seconds(0.0, "How long `wait` waits."),
    "locks.slots": _int(1, 1, "Runs, or workers of runs, that may share one GPU."),
    "locks.slot_memory_gib": Key(
        "number",
        None,
        "GPU memory that must be free for a slot.",
        nullable=True,
        least=0,
        unit="GiB",
    ),
    "workers": _int(1, 1, "Processes to start (launcher: python only)."),
    "watch.mode": _choice(
        "warn",
        "end",
        "off",
        doc="Say where each rank is when the job shows no sign of work for too long; end it then.",
    ),
    "watch.silence_s": _seconds(
        None,
        "How long that is; by default ten times the job's longest gap, 600 s or more.",
        least=1,
    ),
    "notify.command": Key(
        "texts", (), "A command, no shell, that gets each event of `on` as JSON on its stdin."
    ),
    "notify.on": Key(
        "texts",
        (),
        "The events that it gets: all of them where none is named.",
        choices=("failed", "mitigated", "hang", "finished"),
    ),
    "price_per_gpu_hour": Key(
        "number",
        None,
        "What a GPU costs for an hour, in any currency: `saferun runs report` adds it up.",
        nullable=True,
        least=0,
    ),
    "recover.gpu_reset": _choice("never", "when-idle", doc="Whether an idle GPU may be reset."),
}

# What each hook holds, however the script asks: for `saferun help` and docs/hooks.md.
HOOKS: dict[str, str] = {
    "compile": 'autotuning, CUDA graphs or all of `torch.compile` off; `mode="max-autotune"`, '
    "`options=` and assignments to `torch._inductor.config` included",
    "cudagraph_markers": "`torch.compiler.cudagraph_mark_step_begin` does nothing (when "
    "distributed)",
    "init": "the device is set before NCCL starts; ranks that do not arrive are named; ranks with "
    "another torch, CUDA, NCCL or GPU are named, and ranks that train from another step; a barrier "
    "after init",
    "order": "a DataLoader made before the process group, DDP wrapped before the device is set, "
    "`torch.compile` before DDP: said once, with your file and line; a barrier after wrapping",
    "excepthook": "the first exception of each rank stands where torchrun looks for the root "
    "cause; the Python stack of a crash in native code is in the report; what ends a thread is in "
    "the receipt",
    "guards": "a label or an index out of range is a Python error at your line, with the values, "
    "the range and the rank, before the kernel that would make the CUDA context unusable",
    "shards": "ranks that train on the same data are named, with the line of their DataLoader "
    "(torch's or torchdata's)",
    "optuna": "a trial out of GPU memory is pruned; after a sticky CUDA error, and after some "
    "number of good trials, the process is replaced and the study goes on",
    "memory": "the CUDA cache is emptied before and after garbage collection between trials",
    "tensorflow": "`MirroredStrategy` adds up without NCCL and rightly; GPUs take memory as they "
    "need it",
}

MAX_BYTES = 256 * 1024  # of a profile's text
HEAD = ("schema", "name", "description", "extends", "match")
OPEN = ("env", "torchrun")  # sections whose keys are not in the table
LEAF_KEYS = ("value", "why", "source", "when")
WHEN_WORDS = ("torch", "gpus", "distributed")
TORCHRUN_FLAGS = {o.strings[-1].lstrip("-").replace("_", "-"): o.flag for o in OPTIONS}


class Leaf(NamedTuple):
    """One value of a profile, with its reason and the condition under which it applies."""

    value: Value
    why: str = ""
    source: str = ""
    when: tuple[tuple[str, str | bool], ...] = ()
    line: int = 0


class Doc(NamedTuple):
    """One checked profile file, not yet merged with others. Keys of `leaves` are dotted."""

    path: str
    name: str
    description: str
    extends: tuple[str, ...]
    match: tuple[str, ...]  # fragments of GPU product names
    leaves: Mapping[str, Leaf]


def groups() -> set[str]:
    """Return the dotted names of all groups of keys ("hooks", "hooks.compile", …)."""
    return {key[:i] for key in KEYS for i, c in enumerate(key) if c == "."} | set(OPEN)


def children(group: str) -> list[str]:
    """Return the names that are allowed directly below `group` ("" is the top)."""
    if not group:
        return [*HEAD, *dict.fromkeys(k.split(".")[0] for k in [*KEYS, *OPEN])]
    if group == "torchrun":
        return list(TORCHRUN_FLAGS)
    below = [k[len(group) + 1 :].split(".")[0] for k in KEYS if k.startswith(group + ".")]
    return list(dict.fromkeys(below))


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a fix for an unknown name: the nearest known one, or the list of them."""
    known = list(known)
    if close := spelling.nearest(name, known):
        return f"did you mean `{close}`?"
    return f"known here: {', '.join(known)}" if known else ""


# Of one comparison without blanks around it; a version has a few short numbers.
_RANGE = re.compile(r"(>=|<=|==|!=|>|<)?\s{0,8}(\d{1,9}(?:\.\d{1,9}){0,8})\Z")
_OPS = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
}


def is_range(text: str) -> bool:
    """Return whether a text is a list of comparisons such as ">=2.8,<2.10"."""
    return all(_RANGE.match(part.strip()) for part in text.split(","))


def in_range(version: str, wanted: str) -> bool:
    """Return whether a version's release number satisfies every comparison.

    Local and pre-release parts do not count: "2.9.0a0+git1" and "2.9.0+cu130" are both 2.9.0.
    """
    match = re.match(r"\d{1,9}(?:\.\d{1,9}){0,8}", version)
    if not match:
        return False
    have = [int(n) for n in match.group().split(".")]
    for part in wanted.split(","):
        comparison = _RANGE.match(part.strip())
        assert comparison is not None, f"{wanted!r} was checked by is_range"
        op, number = comparison.groups()
        want = [int(n) for n in number.split(".")]
        width = max(len(have), len(want))
        pad = [x + [0] * (width - len(x)) for x in (have, want)]
        if not _OPS[op or "=="](*pad):
            return False
    return True


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a profile, for editors."""
    text = {"type": "string"}
    properties: dict[str, Any] = {
        "schema": {"const": 1, "description": "The version of this format."},
        "name": {**text, "description": "Its name for `--profile`; by default the file's name."},
        "description": text,
        "extends": {
            "anyOf": [text, {"type": "array", "items": text}],
            "description": "Profiles that this one builds on; later ones override earlier ones.",
        },
        "match": _object({"gpu": {"anyOf": [text, {"type": "array", "items": text}]}}),
        "torchrun": _object(
            {name: _entry({"type": ["string", "number", "boolean"]}) for name in TORCHRUN_FLAGS}
        ),
        "env": {
            "type": "object",
            "propertyNames": {"pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "additionalProperties": _entry({"type": ["string", "number"]}),
        },
    }
    for key, spec in KEYS.items():
        *above, name = key.split(".")
        level = properties
        for group in above:
            level = level.setdefault(group, _object({}))["properties"]
        level[name] = {**_entry(_plain_schema(spec)), "description": spec.doc}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "saferun profile",
        **_object(properties),
        "required": ["schema"],
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _entry(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value, bare or annotated with reason, source and condition."""
    text = {"type": "string"}
    comparisons = {"type": ["string", "number"], "pattern": r"^[\d<>=!., ]+$"}
    when = _object({"torch": comparisons, "gpus": comparisons, "distributed": {"type": "boolean"}})
    annotated = _object({"value": plain, "why": text, "source": text, "when": when})
    return {"anyOf": [plain, {**annotated, "required": ["value"]}]}


def _plain_schema(spec: Key) -> dict[str, Any]:
    if spec.kind == "choice":
        # an editor may read `off` as text or, by YAML 1.1, as false
        also = [b for b, name in ((True, "on"), (False, "off")) if name in spec.choices]
        return {"enum": [*spec.choices, *also], "default": spec.default}
    number: dict[str, Any] = {} if spec.least is None else {"minimum": spec.least}
    if spec.kind == "range":
        items = {"type": "number", **number}
        return {"type": "array", "items": items, "minItems": 2, "maxItems": 2}
    if spec.kind == "text":
        return {"type": "string", "default": spec.default}
    if spec.kind == "texts":
        item = {"enum": list(spec.choices)} if spec.choices else {"type": "string"}
        return {"type": "array", "items": item, "default": []}
    kind = {"bool": "boolean", "int": "integer", "number": "number"}[spec.kind]
    return {
        "type": [kind, "null"] if spec.nullable else kind,
        **number,
        "default": spec.default,
    }
