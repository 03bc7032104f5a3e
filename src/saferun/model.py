"""The frozen values that flow through saferun, in the order in which they are made.

They are named tuples, not dataclasses: `import dataclasses` and the classes it would build here
cost about 20 ms of the 60 ms that a launch may take (benchmarks/imports.py), and a tuple is just
as frozen. Mappings inside are read-only by convention and never changed after construction.
"""

from __future__ import annotations

from collections.abc import Mapping

from saferun.named_tuple import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Setting(NamedTuple):
    """One environment variable's value and where it came from."""

    value: str
    origin: str  # "profiles/h100.yaml", "--set", "exported + profiles/h100.yaml", "saferun"
    why: str = ""
    source: str = ""


class Option(NamedTuple):
    """One option of torchrun's parser."""

    dest: str  # "nproc_per_node"
    strings: tuple[str, ...]  # ("--nproc-per-node", "--nproc_per_node")
    flag: bool  # takes no value
    env: str | None  # "PET_NPROC_PER_NODE", None where torchrun reads none


class CommandLine(NamedTuple):
    """A torchrun command line, read as torchrun's own parser reads it.

    `given` holds what the user's own words set: dest -> the last value as text ("" for a flag).
    `args` is what torchrun is handed: the user's words, less saferun's own options.
    `refusal` is torchrun's own complaint where its parser would refuse `args`; then script is None.
    """

    args: tuple[str, ...]
    given: Mapping[str, str]
    script: str | None
    script_args: tuple[str, ...]
    refusal: str | None = None


class LaunchOptions(NamedTuple):
    """What torchrun's options, given or from `PET_*`, mean for us; computed once from the words."""

    nodes: int | None  # the most that --nnodes allows; None where it is unreadable
    processes: str | None  # per node, as written: "2", "gpu", "cpu"; None where not given
    restarts: int  # torchrun's own, per attempt
    standalone: bool
    backend: str  # of the rendezvous: "static", "c10d", "etcd-v2"
    endpoint: str  # of the rendezvous, HOST[:PORT]; "" where not given
    conf: str  # of the rendezvous: "store_type=file"
    master_addr: str  # "" where not given
    shutdown_timeout_s: int | None
    handles_signals: bool  # --signals-to-handle is given
    module: bool  # -m
    no_python: bool
    run_path: bool
    foreign: tuple[str, ...]  # given options that mean nothing to plain python


class Request(NamedTuple):
    """What the user asked for: saferun's own options and the torchrun command line."""

    line: CommandLine
    options: LaunchOptions  # of `line`
    profile: str | None = None
    profile_origin: str = ""  # "--profile", "SAFERUN_PROFILE"; "" where none was named
    sets: tuple[tuple[str, str, str], ...] = ()  # (key, value, origin), in order
    retries: int | None = None
    run_dir: str | None = None
    dry_run: bool = False


class Gpu(NamedTuple):
    """One GPU that the job may see."""

    number: int | None  # as nvidia-smi numbers it; None where only the UUID is known
    uuid: str  # "GPU-…" or "MIG-…"; "" where unknown
    name: str  # "NVIDIA H200"; "" where unknown


class GpuFacts(NamedTuple):
    """What the machine says about its GPUs, without a CUDA context."""

    gpus: tuple[Gpu, ...] = ()  # visible ones only, in the order the job sees them
    source: str = "none"  # "proc", "nvidia-smi", "none"
    warning: str = ""  # one line for people, where the answer is in doubt


class Facts(NamedTuple):
    """What is known about where the job will run."""

    gpu: GpuFacts = GpuFacts()
    torch: str | None = None  # "2.13.0+cpu"; None where it could not be found out
    launcher: tuple[str, ...] = ("torchrun",)  # how torchrun is started: ("/venv/bin/torchrun",)
    python: str = "python"  # what `launcher: python` starts


class CompileHook(NamedTuple):
    """`hooks.compile`: what torch.compile may do."""

    enabled: str
    autotune: str
    cudagraphs: str
    fallback: str


class InitHook(NamedTuple):
    """`hooks.init`: how ranks meet in init_process_group."""

    set_device: bool
    barrier: str
    agree: str
    timeout_s: float


class OrderHook(NamedTuple):
    """`hooks.order`: what happens when things are made before the process group."""

    mode: str
    wrap_barrier: bool


class GuardsHook(NamedTuple):
    """`hooks.guards`: checks before a kernel that would poison the CUDA context."""

    labels: str
    logits: str
    embeddings: str


class MemoryHook(NamedTuple):
    """`hooks.memory`: when the allocator's cache is cleared."""

    clear_between_trials: bool


class OptunaHook(NamedTuple):
    """`hooks.optuna`: how a study goes on after CUDA errors."""

    mode: str
    recycle_every: int


class TensorflowHook(NamedTuple):
    """`hooks.tensorflow`: how MirroredStrategy adds up, and how memory is taken."""

    cross_device_ops: str
    memory_growth: bool


class HookSettings(NamedTuple):
    """The `hooks` section: one field for each hook."""

    compile: CompileHook
    cudagraph_markers: str
    init: InitHook
    excepthook: str
    order: OrderHook
    shards: str
    guards: GuardsHook
    memory: MemoryHook
    optuna: OptunaHook
    tensorflow: TensorflowHook
    required: bool


class RetryPolicy(NamedTuple):
    """The `retry` section; seconds where a name ends in _s."""

    attempts: int  # in a row without progress
    attempts_total: int
    backoff_s: tuple[float, float]  # first and longest wait
    deadline_s: float | None
    unknown_after_s: float | None
    rejoin_s: float
    debug_last: bool
    resume_args: tuple[str, ...]


class MitigationPolicy(NamedTuple):
    """The `mitigate` section."""

    enabled: bool
    remember: bool
    never: tuple[str, ...]


class PreflightPolicy(NamedTuple):
    """The `preflight` section."""

    mode: str  # off, warn, require
    timeout_s: float


class LockPolicy(NamedTuple):
    """The `locks` section."""

    gpus: str  # warn, refuse, wait, off
    wait_s: float
    slots: int  # runs that may share a GPU
    slot_memory_gib: float | None


class WatchPolicy(NamedTuple):
    """The `watch` section."""

    silence_s: float | None


class RecoverPolicy(NamedTuple):
    """The `recover` section."""

    gpu_reset: str  # never, when-idle


class Settings(NamedTuple):
    """Every key of a profile but `launcher`, with defaults where nothing is given."""

    hooks: HookSettings
    retry: RetryPolicy
    mitigate: MitigationPolicy
    preflight: PreflightPolicy
    locks: LockPolicy
    workers: int
    watch: WatchPolicy
    recover: RecoverPolicy


class ProcessLimits(NamedTuple):
    """What mitigations change for the launcher's process."""

    nofile: int | None = None  # the soft limit of open files, raised as far as the hard one allows
    session: str = ""  # "new": a session of its own
    ignore: tuple[str, ...] = ()  # names of signals: "SIGHUP"


class Changes(NamedTuple):
    """What the mitigations in force change together; it goes over everything else in a plan."""

    names: tuple[str, ...] = ()  # of the mitigations, in order
    env: tuple[tuple[str, Setting], ...] = ()  # in the order of the mitigations
    hooks: Mapping[str, Mapping[str, str | bool]] = {}  # hook -> key -> value
    notes: Mapping[str, Setting] = {}  # hooks.compile.autotune -> value and origin
    torchrun: tuple[str, ...] = ()  # "--master-port=40123"
    limits: ProcessLimits = ProcessLimits()
    needs_hooks: bool = False  # some mitigation does its work inside the ranks


NO_CHANGES = Changes()


class Profile(NamedTuple):
    """A profile with its ancestors merged and its `when:` clauses decided.

    `notes` has value, origin, why and source by dotted key for those that a file or an option set.
    """

    name: str
    launcher: str
    torchrun: Mapping[str, Setting]  # "nproc-per-node" -> default used where the user gave none
    env: Mapping[str, Setting]
    settings: Settings
    notes: Mapping[str, Setting]
    named: bool  # the user named it; a detected one never changes torchrun's arguments
    origin: str  # "--profile", "SAFERUN_PROFILE", "./saferun.yaml", "detected"


class Identity(NamedTuple):
    """Which attempt of which run a plan is for, and where its processes find our files."""

    site: str  # the directory that holds sitecustomize.py
    run: str = ""
    attempt: int = 1
    receipts: str | None = None  # directory; None where nothing can be written


class LaunchPlan(NamedTuple):
    """Everything about one attempt. Whatever starts, prints or generates something renders this."""

    profile: str
    launcher: str
    command: tuple[str, ...]
    torchrun_args: tuple[str, ...]
    script: str | None
    script_args: tuple[str, ...]
    options: LaunchOptions  # of torchrun_args
    env: Mapping[str, Setting]  # only what saferun sets
    settings: Settings  # hooks, retry, locks and the other policies in force
    devices: tuple[str, ...]  # UUIDs of the GPUs that the job sees, to be locked and tried
    mitigations: tuple[str, ...]
    profile_origin: str
    gpus: GpuFacts
    notes: Mapping[str, Setting]  # where the values of `settings` come from
    kept: Mapping[str, Setting]  # the profile's values that gave way to exported ones
    hint: str = ""  # one clause for the headline: what naming the profile would change
    remarks: tuple[str, ...] = ()  # lines about what could not be done as asked
    limits: ProcessLimits = ProcessLimits()
    disabled: bool = False  # SAFERUN_DISABLE: torchrun as the user wrote it, nothing of ours

    @property
    def supervised(self) -> bool:
        """Whether saferun stays beside the job; else it is replaced by it."""
        return not self.disabled and self.settings.retry.attempts > 1

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the job: the user's own with the plan's on top."""
        return {**environ, **{name: setting.value for name, setting in self.env.items()}}


def as_tree(value: Any) -> Any:
    """Return a named tuple and what is in it as dictionaries and lists, for JSON and YAML."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        if fields is None:
            return [as_tree(item) for item in value]
        return {name: as_tree(item) for name, item in zip(fields, value, strict=True)}
    return value


OK = "ok"
NOTE = "note"
PROBLEM = "problem"


class Finding(NamedTuple):
    """One thing found.

    `level` is `ok`, `note` or `problem`; `area` names what was looked at ("settings", "driver",
    "GPU 3"); `what` is the finding in one line; `detail` holds the reasons and where they stand
    written, and `fix` what to do about it (both may be empty).
    """

    level: str
    area: str
    what: str
    detail: str
    fix: str
