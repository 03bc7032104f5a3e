"""The frozen values that flow through saferun, in the order in which they are made.

They are named tuples, not dataclasses: `import dataclasses` and the classes it would build here
cost about 20 ms of the 60 ms that a launch may take (benchmarks/imports.py), and a tuple is just
as frozen. Mappings inside are read-only by convention and never changed after construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


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


class Request(NamedTuple):
    """What the user asked for: saferun's own options and the torchrun command line."""

    line: CommandLine
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


class Profile(NamedTuple):
    """A profile with its ancestors merged and its `when:` clauses decided.

    `sections` is the nested tree of all other keys, complete with defaults; `notes` has value,
    origin, why and source by dotted key for those that a file or an option set.
    """

    name: str
    launcher: str
    torchrun: Mapping[str, Setting]  # "nproc-per-node" -> default used where the user gave none
    env: Mapping[str, Setting]
    sections: Mapping[str, Any]  # hooks, retry, mitigate, preflight, locks, workers, watch, recover
    notes: Mapping[str, Setting]
    named: bool  # the user named it; a detected one never changes torchrun's arguments
    origin: str  # "--profile", "SAFERUN_PROFILE", "./saferun.yaml", "detected"
    gpu_profile: bool  # it is for a GPU: somewhere in its chain stands a GPU's name, or cuda


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
    env: Mapping[str, Setting]  # only what saferun sets
    hooks: Mapping[str, Any]
    retry: Mapping[str, Any]
    locks: Mapping[str, Any]
    mitigations: tuple[str, ...]
    policy: Mapping[str, Any]  # mitigate, preflight, workers, watch, recover
    profile_origin: str
    gpus: GpuFacts
    notes: Mapping[str, Setting]  # where the values of hooks, retry and the rest come from
    kept: Mapping[str, Setting]  # the profile's values that gave way to exported ones
    hint: str = ""  # one clause for the headline: what naming the profile would change
    remarks: tuple[str, ...] = ()  # lines about what could not be done as asked
    limits: Mapping[str, Any] = {}  # of the launcher's process: nofile, session ("new"), ignore

    @property
    def supervised(self) -> bool:
        """Whether saferun stays beside the job; else it is replaced by it."""
        return bool(self.retry) and self.retry["attempts"] > 1

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the job: the user's own with the plan's on top."""
        return {**environ, **{name: setting.value for name, setting in self.env.items()}}


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


class ProcessLimits(NamedTuple):
    """What a mitigation changes for the launcher's process."""

    nofile: int | None = None  # the soft limit of open files, raised as far as the hard one allows
    session: str = ""  # "new": it leads a session of its own
    ignore: tuple[str, ...] = ()  # names of signals
