"""The immutable values that several packages share, in the order in which a launch makes them.

What a launch loads before torchrun runs are named tuples: to make a frozen dataclass takes five
times as long, and 145 of them would take half of the time that a launch may take
(benchmarks/imports.py). All other values are frozen dataclasses. Mappings in them are read-only by
convention: nothing changes one after construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from saferun.settings import Settings


class Setting(NamedTuple):
    """One value of a variable, an option or a profile key, with its origin and its reason."""

    value: str
    origin: str  # "profiles/h100.yaml", "--set", "exported + profiles/h100.yaml", "saferun"
    why: str = ""
    source: str = ""


class Option(NamedTuple):
    """One option of torchrun's parser."""

    dest: str  # "nproc_per_node"
    strings: tuple[str, ...]  # ("--nproc-per-node", "--nproc_per_node")
    flag: bool  # an option without a value
    env: str | None  # "PET_NPROC_PER_NODE"; None if torchrun reads no variable


class CommandLine(NamedTuple):
    """A torchrun command line, read as torchrun's own parser reads it.

    `given` holds the options that the user wrote: dest -> the last value as text ("" for a flag).
    `args` is what torchrun gets: the user's arguments without saferun's own options.
    `refusal` is torchrun's error message if its parser would refuse `args`; script is then None.
    """

    args: tuple[str, ...]
    given: Mapping[str, str]
    script: str | None
    script_args: tuple[str, ...]
    refusal: str | None = None


class LaunchOptions(NamedTuple):
    """The typed values of torchrun's options that saferun uses, given or from `PET_*`."""

    nodes: int | None  # the most that --nnodes allows; None if it is unreadable
    processes: str | None  # per node, as written: "2", "gpu", "cpu"; None if not given
    restarts: int  # torchrun's own, per attempt
    standalone: bool
    backend: str  # the kind of rendezvous: "static", "c10d", "etcd-v2"
    endpoint: str  # HOST[:PORT] of the rendezvous; "" if not given
    conf: str  # options of the rendezvous: "store_type=file"
    master_addr: str  # "" if not given
    shutdown_timeout_s: int | None
    handled_signals: tuple[str, ...]  # --signals-to-handle, if given
    module: bool  # -m
    no_python: bool
    run_path: bool
    code: bool  # -c, for plain python: SCRIPT is code
    foreign: tuple[str, ...]  # given options that have no meaning for plain python


class Request(NamedTuple):
    """The user's command line, split into saferun's own options and torchrun's."""

    line: CommandLine
    options: LaunchOptions  # computed from `line`
    profile: str | None = None
    profile_origin: str = ""  # "--profile", "SAFERUN_PROFILE"; "" if none was named
    sets: tuple[tuple[str, str, str], ...] = ()  # (key, value, origin), in order
    retries: int | None = None
    run_dir: str | None = None
    dry_run: bool = False
    python: CommandLine | None = None  # `line` as plain python reads it; None: as torchrun does


class Gpu(NamedTuple):
    """One GPU that is visible to the job."""

    number: int | None  # the index in nvidia-smi; None if only the UUID is known
    uuid: str  # "GPU-…" or "MIG-…"; "" if unknown
    name: str  # "NVIDIA H200"; "" if unknown
    parent: str = ""  # UUID of the GPU that a MIG instance is part of


class GpuFacts(NamedTuple):
    """The GPUs of the machine, detected without a CUDA context."""

    gpus: tuple[Gpu, ...] = ()  # visible ones only, in the order the job sees them
    source: str = "none"  # "proc", "nvidia-smi", "none"
    warning: str = ""  # one line for people, if the detection is uncertain


class MachineFacts(NamedTuple):
    """The machine that runs the job, as far as it is known."""

    gpu: GpuFacts = GpuFacts()
    torch: str | None = None  # "2.13.0+cpu"; None if it is not known
    launcher: tuple[str, ...] = ("torchrun",)  # how torchrun is started: ("/venv/bin/torchrun",)
    python: str = "python"  # the program that `launcher: python` starts


class ProcessLimits(NamedTuple):
    """Changes that mitigations make to the launcher's process."""

    nofile: int | None = None  # soft limit of open files; the hard limit bounds it
    nproc: int | None = None  # the same of processes and threads
    session: str = ""  # "new": a session of its own
    ignore: tuple[str, ...] = ()  # names of signals: "SIGHUP"


class Changes(NamedTuple):
    """The changes of all mitigations in force; they override everything else in a plan."""

    names: tuple[str, ...] = ()  # the mitigations, in order
    env: tuple[tuple[str, Setting], ...] = ()  # variables, in the order of the mitigations
    hooks: Mapping[str, str | bool] = {}  # "hooks.compile.autotune" -> value
    notes: Mapping[str, Setting] = {}  # hooks.compile.autotune -> value and origin
    torchrun: tuple[str, ...] = ()  # "--master-port=40123"
    limits: ProcessLimits = ProcessLimits()
    needs_hooks: bool = False  # a mitigation is applied by a hook inside the ranks


NO_CHANGES = Changes()


class Profile(NamedTuple):
    """A profile with its ancestors merged and its `when:` clauses evaluated.

    `notes` has value, origin, why and source of each key that a file or an option sets.
    """

    name: str
    torchrun: Mapping[str, Setting]  # "nproc-per-node" -> the default if the user gives none
    env: Mapping[str, Setting]
    settings: Settings
    notes: Mapping[str, Setting]
    named: bool  # whether the user named it; a detected one never changes torchrun's arguments
    origin: str  # "--profile", "SAFERUN_PROFILE", "./saferun.yaml", "detected"


class Checkpoint(NamedTuple):
    """A checkpoint that the job has written."""

    path: str  # as the pattern finds it: relative to the job's directory, or absolute
    step: int  # the number in its name; -1 if there is none
    at_s: float  # time of the last write, in seconds since the epoch


class Identity(NamedTuple):
    """The run and attempt of a plan, and the paths that its processes need."""

    site: str  # the directory that holds sitecustomize.py
    run: str = ""
    attempt: int = 1
    receipts: str | None = None  # directory; None if it is not writable
    state: str | None = None  # directory that the run's processes share; None for none
    flight: str | None = None  # directory for torch's flight records, which takes named pipes
    worker: int | None = None  # worker number from 0 on (launcher: python with several workers)
    visible: str | None = None  # CUDA_VISIBLE_DEVICES of that worker; None: the run's own
    checkpoint: Checkpoint | None = None  # the one that the attempt goes on from
    previous: int | None = None  # exit status of the previous attempt, if it failed


class LaunchPlan(NamedTuple):
    """The command, environment and settings of one attempt.

    The code that starts it adds what only a run has: the exported variables, those of the locks and
    of the nodes.
    """

    profile: str
    launcher: str
    command: tuple[str, ...]
    torchrun_args: tuple[str, ...]
    script: str | None
    script_args: tuple[str, ...]
    options: LaunchOptions  # computed from torchrun_args
    env: Mapping[str, Setting]  # only what saferun sets
    settings: Settings  # hooks, retry, locks and the other policies in force
    mitigations: tuple[str, ...]
    profile_origin: str
    gpus: GpuFacts
    notes: Mapping[str, Setting]  # value and origin of keys in `settings`
    kept: Mapping[str, Setting]  # profile settings that exported variables override
    hint: str = ""  # one clause for the headline: what naming the profile would change
    remarks: tuple[str, ...] = ()  # warnings, one line each
    limits: ProcessLimits = ProcessLimits()
    checkpoint: Checkpoint | None = None  # the one that the attempt goes on from
    disabled: bool = False  # SAFERUN_DISABLE: torchrun runs as the user wrote it

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the job: the user's, overridden by the plan's variables."""
        return {**environ, **{name: setting.value for name, setting in self.env.items()}}


def as_tree(value: Any) -> Any:
    """Return a value for JSON and YAML: what has fields as dictionaries, other tuples as lists."""
    fields = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: as_tree(getattr(value, name)) for name in fields}
    return [as_tree(item) for item in value] if isinstance(value, tuple) else value


OK = "ok"
NOTE = "note"
PROBLEM = "problem"


class Finding(NamedTuple):
    """One result of an examination of the machine or the settings.

    `level` is `ok`, `note` or `problem`; `area` names what was examined ("settings", "driver",
    "GPU 3"); `what` is the result in one line; `detail` gives reasons and sources, and `fix` what
    the user should do (both may be empty).
    """

    level: str
    area: str
    what: str
    detail: str = ""
    fix: str = ""
