"""Pure: checks of disks, memory, limits, clock, compilers and the scheduler of this job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from saferun.doctor.vitals import Clock, Disk, Limits, Memory, Tools, Torch
from saferun.model import NOTE, OK, PROBLEM, Finding, GpuFacts

GIB = 1 << 30
SHM = "/dev/shm"  # noqa: S108 - only a title; nothing is written there
SHM_SMALL = GIB  # docker gives 64 MiB; one DataLoader worker keeps several batches in it
SHM_FREE = 256 << 20
DISK_EMPTY, DISK_SMALL = GIB, 10 * GIB
INODES = 10_000
MEMORY_LOW = 4 * GIB
FILES_LOW, FILES_FEW = 1024, 4096
PROCESSES_FEW = 4096
OLDEST_YEAR = 2024  # an older date is wrong: saferun is younger
_WRITTEN = "torch.compile's libraries are loaded from there: `failed to map segment`"


def disks(found: Iterable[Disk]) -> Iterator[Finding]:
    """Check that the directories can be written, and have free space."""
    well = []
    for disk in found:
        trouble = list(_of_disk(disk))
        yield from trouble
        if not trouble and disk.free >= 0:
            well.append(disk)
    if well:
        least = min(well, key=lambda disk: disk.free)
        what = f"{len(well)} directories can be written; least room: {_size(least.free)}"
        yield Finding(OK, "disk", what, least.place)


def _of_disk(disk: Disk) -> Iterator[Finding]:
    name = f"{disk.role} {disk.path}"
    if disk.trouble:
        what = f"{name} cannot be written: {disk.trouble}"
        yield Finding(PROBLEM, "disk", what, disk.place, _elsewhere(disk.role, full=False))
        return
    if 0 <= disk.free < DISK_SMALL:
        what = f"{_size(disk.free)} free of {_size(disk.total)} for {name}"
        level = PROBLEM if disk.free < DISK_EMPTY else NOTE
        yield Finding(level, "disk", what, disk.place, _elsewhere(disk.role))
    if disk.inodes and 0 <= disk.inodes_free < INODES:
        what = f"{disk.inodes_free} files more fit on the disk of {name}"
        detail = f"of {disk.inodes} inodes; `No space left on device` comes although there is room"
        yield Finding(PROBLEM, "disk", what, detail, _elsewhere(disk.role))
    if disk.noexec and disk.role in ("compile cache", "Triton's cache"):
        what = f"nothing can be executed from {name} (mounted noexec)"
        yield Finding(PROBLEM, "disk", what, _WRITTEN, _elsewhere(disk.role))


def _elsewhere(role: str, *, full: bool = True) -> str:
    variable = {
        "temporary files": "TMPDIR",
        "compile cache": "TORCHINDUCTOR_CACHE_DIR",
        "Triton's cache": "TRITON_CACHE_DIR",
        "models and data sets": "HF_HOME",
    }.get(role)
    if variable:
        return f"export {variable}=DIRECTORY on another disk"
    return "make room" if full else "start jobs in a directory that this user may write"


def _size(count: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def shared_memory(memory: Memory) -> Iterator[Finding]:
    """Check the memory file system through which DataLoader workers and NCCL exchange data."""
    if memory.shm_total < 0:
        yield Finding(NOTE, SHM, "there is none", "", "mount a tmpfs there")
        return
    text = f"{_size(memory.shm_free)} free of {_size(memory.shm_total)}"
    fix = "docker run --shm-size=16g (or --ipc=host); Kubernetes: an emptyDir, medium Memory"
    if memory.shm_total < SHM_SMALL:
        detail = "DataLoader workers die of SIGBUS where it runs out, NCCL cannot start"
        yield Finding(PROBLEM, SHM, f"small: {text}", detail, fix)
    elif memory.shm_free < SHM_FREE:
        fix = "what killed jobs left: `ls -l /dev/shm`, remove what no process uses"
        yield Finding(PROBLEM, SHM, f"full: {text}", "", fix)
    else:
        yield Finding(OK, SHM, text)


def memory(found: Memory) -> Iterator[Finding]:
    """Check the memory available to the machine and to our control group."""
    free = found.available
    whose = ""
    if found.limit >= 0 and (found.total < 0 or found.limit < found.total):
        whose = f", limit of the container or job {_size(found.limit)}"
        free = min(free, found.limit - max(found.used, 0)) if free >= 0 else free
    if free < 0:
        return
    what = f"{_size(max(free, 0))} available of {_size(found.total)}{whose}"
    if free < MEMORY_LOW:
        fix = "end what takes it, or ask for more: the kernel kills the largest process"
        yield Finding(PROBLEM if free < GIB else NOTE, "memory", what, "", fix)
    else:
        yield Finding(OK, "memory", what)


def processors(found: Memory, gpus: int) -> Iterator[Finding]:
    """Check CPU time: each rank needs its own core, and its DataLoader workers need more."""
    share = found.quota or found.cpus
    if not share:
        return
    what = f"{found.cpus} CPUs"
    if found.quota and found.quota < found.cpus:
        what = f"time for {found.quota:g} CPUs of {found.cpus} that are seen"
        detail = "programs that start a thread a CPU take turns: slow steps, late heartbeats"
        fix = f"OMP_NUM_THREADS and num_workers to fit {found.quota:g}, or a larger limit"
        yield Finding(NOTE, "CPUs", what, detail, fix)
    elif gpus and share < 2 * gpus:
        detail = "each rank needs one, and its DataLoader workers more"
        yield Finding(NOTE, "CPUs", f"{what} for {gpus} GPUs", detail, "ask for more CPUs")
    else:
        yield Finding(OK, "CPUs", what)


def numa(
    gpus: Mapping[str, int], nodes: Mapping[int, int], numbers: Mapping[str, int]
) -> Iterator[Finding]:
    """Check that ranks can run, and do run, on the NUMA node of their GPU.

    Args:
        gpus: the node of each GPU, by PCI address.
        nodes: number of CPUs of each node that a job may use.
        numbers: the GPUs' numbers, by PCI address.
    """
    if len(nodes) < 2 or not gpus:
        return
    away = sorted(bus for bus, node in gpus.items() if not nodes.get(node))
    for bus in away:
        what = f"none of the CPUs of its NUMA node {gpus[bus]} may be used here"
        detail = "its rank runs beside another node's memory: copies to the GPU cross the sockets"
        fix = "give the job CPUs of that node, too (srun --cpu-bind, docker --cpuset-cpus, taskset)"
        yield Finding(NOTE, f"GPU {numbers.get(bus, bus)}", what, detail, fix)
    if not away and sum(map(bool, nodes.values())) > 1:
        what = f"{len(nodes)} NUMA nodes, and nothing binds a rank to that of its GPU"
        detail = "a rank that runs on the other one reads and writes that one's memory"
        fix = "try `torchrun --numa-binding=node` (torch 2.9 on), and measure a step with it"
        yield Finding(NOTE, "NUMA", what, detail, fix)


def limits(found: Limits) -> Iterator[Finding]:
    """Check the limits on open files and on processes."""
    hard = "unlimited" if found.files_hard < 0 else str(found.files_hard)
    what = f"{found.files} files open at once (ulimit -n)"
    fix = f"`ulimit -n {hard}` before the job; docker run --ulimit nofile=65536"
    if 0 <= found.files < FILES_FEW:
        detail = "each DataLoader worker and connection takes some: `Too many open files`"
        level = PROBLEM if found.files < FILES_LOW else NOTE
        yield Finding(level, "limits", what, detail, fix)
    else:
        yield Finding(OK, "limits", "unlimited files" if found.files < 0 else what)
    if 0 <= found.processes < PROCESSES_FEW:
        what = f"{found.processes} processes and threads (ulimit -u)"
        detail = "`Resource temporarily unavailable` where it runs out"
        yield Finding(NOTE, "limits", what, detail, "`ulimit -u unlimited`")


def clock(found: Clock) -> Iterator[Finding]:
    """Check the clock: TLS needs the right date, and comparing machines' logs the right time."""
    if 0 < found.year < OLDEST_YEAR:
        what = f"the clock says {found.year}"
        yield Finding(PROBLEM, "clock", what, "downloads fail: certificates", "set the clock")
    elif found.synchronised is False:
        what = "no service keeps the clock right"
        detail = "as adjtimex says; a virtual machine's host may do it unseen"
        yield Finding(NOTE, "clock", what, detail, "start chronyd or systemd-timesyncd")
    elif found.synchronised:
        yield Finding(OK, "clock", "synchronised")


def compilers(
    tools: Tools, torch: Torch, environ: Mapping[str, str], gpus: bool
) -> Iterator[Finding]:
    """Check what torch.compile runs: a C compiler for Triton, ptxas, C++ for code on the CPU.

    Args:
        tools: the compilers that were found.
        torch: facts about the user's torch.
        environ: the job's environment; CC, CXX and TRITON_PTXAS_PATH count.
        gpus: whether there is a GPU.
    """
    missing = []
    if environ.get("CC", "").strip() and not tools.cc:
        what = f"CC={environ['CC']} is not a program on PATH"
        yield Finding(PROBLEM, "compiler", what, "", "unset it, or name a compiler")
    elif gpus and not tools.cc:
        missing.append("a C compiler (gcc or clang; Triton builds its launchers with it)")
    if not gpus and not tools.cxx:
        missing.append(f"a C++ compiler ({environ.get('CXX') or 'g++'})")
    if torch.python and not torch.python_h and gpus:
        missing.append(f"Python.h in {torch.include} (package python3-dev)")
    if torch.cuda and not torch.triton:
        missing.append("the package triton")
    given = environ.get("TRITON_PTXAS_PATH", "")
    if given and not tools.ptxas:
        what = f"TRITON_PTXAS_PATH={given} is not a program"
        yield Finding(PROBLEM, "compiler", what, "", "unset it: Triton brings its own ptxas")
    elif torch.cuda and torch.triton and not (torch.ptxas or tools.ptxas):
        missing.append("ptxas (part of Triton and of the CUDA toolkit)")
    for program in missing:
        what = f"torch.compile will fail without {program}"
        yield Finding(NOTE, "compiler", what, "", "install it; code that is not compiled runs")
    if not missing and (tools.cc or tools.cxx):
        paths = [tools.cc if gpus else tools.cxx or tools.cc]
        paths += [torch.ptxas or tools.ptxas] if gpus else []
        yield Finding(OK, "compiler", ", ".join(filter(None, paths)))


# For each scheduler: a variable that is always set, the name, variables with the allocation.
_SCHEDULERS = (
    ("SLURM_JOB_ID", "Slurm", ("SLURM_NNODES", "SLURM_NTASKS", "SLURM_GPUS_ON_NODE")),
    ("PBS_JOBID", "PBS", ("PBS_NUM_NODES", "NCPUS")),
    ("LSB_JOBID", "LSF", ("LSB_DJOB_NUMPROC", "LSB_HOSTS")),
    ("KUBERNETES_SERVICE_HOST", "Kubernetes", ("NVIDIA_VISIBLE_DEVICES",)),
    ("RAY_JOB_ID", "Ray", ("RAY_ADDRESS",)),
)


def scheduler(environ: Mapping[str, str], facts: GpuFacts, present: int) -> Iterator[Finding]:
    """Report the scheduler's allocation, and check which of the GPUs CUDA shows.

    Args:
        environ: the job's environment.
        facts: the GPUs that the job would see.
        present: number of GPUs in the machine.
    """
    for variable, name, allocated in _SCHEDULERS:
        if environ.get(variable):
            detail = ", ".join(f"{n}={environ[n]}" for n in allocated if environ.get(n))
            yield Finding(OK, "scheduler", f"{name}{_job(environ, variable)}", detail)
    yield from _visible(environ, facts, present)
    yield from _tasks(environ, present)


def _job(environ: Mapping[str, str], variable: str) -> str:
    return "" if variable.startswith("KUBERNETES") else f" job {environ[variable]}"


def _visible(environ: Mapping[str, str], facts: GpuFacts, present: int) -> Iterator[Finding]:
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    setting = f"CUDA_VISIBLE_DEVICES={wanted}"
    if facts.warning and setting not in facts.warning:
        if present:
            yield _unlisted(facts)
    elif wanted is None:
        return
    elif present and not facts.gpus:
        deliberate = wanted.strip() in ("", "-1", "NoDevFiles")
        what = f"{setting} hides all {present} GPUs"
        level = NOTE if deliberate else PROBLEM
        yield Finding(level, "GPUs", what, facts.warning, "unset it, or name GPUs that are here")
    elif facts.warning:
        absent = "counts from" not in facts.warning  # else all that it names is present
        fix = "name GPUs that are here" if absent else "export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        yield Finding(PROBLEM if absent else NOTE, "GPUs", facts.warning, "", fix)
    elif present:
        what = f"{setting}: the job sees {len(facts.gpus)} of {present} GPUs"
        yield Finding(OK, "GPUs", what)


def _unlisted(facts: GpuFacts) -> Finding:
    """Return the finding if the list of GPUs is in doubt, or may surprise the user."""
    fix = "run `nvidia-smi -L` by hand: a launch gets the list of GPUs from it"
    if facts.gpus:
        one_instance = facts.warning.startswith("MIG:")  # certain, and the warning says what to do
        return Finding(NOTE, "GPUs", facts.warning, "", "" if one_instance else fix)
    why = "a launch takes this for a machine without GPUs"
    return Finding(PROBLEM, "GPUs", facts.warning, why, fix)


def _tasks(environ: Mapping[str, str], present: int) -> Iterator[Finding]:
    """Check for one srun task per GPU: each task would start torchrun with all ranks."""
    local = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    count = local.partition("(")[0].partition(",")[0]
    inside = environ.get("SLURM_STEP_ID", "").isdecimal() and "SLURM_LOCALID" in environ
    if inside and count.isdecimal() and int(count) > 1:
        what = f"{count} tasks on this node: each would start torchrun with all its ranks"
        yield Finding(NOTE, "scheduler", what, "", "srun --ntasks-per-node=1 before torchrun")
    allocated = environ.get("SLURM_GPUS_ON_NODE", "")
    if allocated.isdecimal() and present and int(allocated) < present:
        what = f"Slurm gave {allocated} GPUs, and {present} can be opened here"
        fix = "keep CUDA_VISIBLE_DEVICES as Slurm set it (ConstrainDevices is off)"
        yield Finding(NOTE, "scheduler", what, "", fix)
