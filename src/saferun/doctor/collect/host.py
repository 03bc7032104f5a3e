"""What a job needs of the machine besides GPUs: disks, memory, limits, clock, compilers.

A hanging file system (a dead NFS server) also hangs its readers, so each directory is examined in
its own thread, for which nobody waits beyond the deadline.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import resource
import tempfile
import time
from collections.abc import Mapping

from saferun.base import proc
from saferun.doctor.collect import together
from saferun.doctor.vitals import Clock, Disk, Host, Limits, Memory, Tools
from saferun.system import cgroup, compile_cache, paths, procfs

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_HANGS = "it does not answer (a hanging file system?)"


def directories(environ: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Return the directories to which a job writes, by their purpose.

    Sources: torch/_inductor/runtime/cache_dir_utils.py (`triton_cache_dir`), triton/knobs.py
    (`~/.triton/cache`), huggingface_hub/constants.py (`HF_HOME`).
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    temporary = next((environ[n] for n in ("TMPDIR", "TEMP", "TMP") if environ.get(n)), "/tmp")  # noqa: S108 - only its free space is read
    hub = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    found = {
        "working directory": cwd,
        "temporary files": temporary,
        "compile cache": compile_cache.directory(environ),
        "Triton's cache": environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"),
        "models and data sets": environ.get("HF_HUB_CACHE") or hub,
    }
    return {role: os.path.normpath(os.path.join(cwd, path)) for role, path in found.items()}


def disks(folders: Mapping[str, str], timeout_s: float) -> tuple[Disk, ...]:
    """Examine each directory; one without an answer in time is reported as hanging."""
    questions = {role: functools.partial(disk, role, path) for role, path in folders.items()}
    found = together.ask(questions, timeout_s).answers
    return tuple(
        found.get(role) or Disk(role, path, path, _HANGS) for role, path in folders.items()
    )


def disk(role: str, path: str) -> Disk:
    """Return the space in a directory, or in its nearest existing parent.

    A nameless file is created in it as a test, and removed at once.
    """
    place = path
    while not os.path.isdir(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    trouble = _cannot_write(place)
    if not trouble and os.path.lexists(path) and not os.path.isdir(path):
        trouble = "it is not a directory"
    try:
        space = os.statvfs(place)
    except OSError as error:
        return Disk(role, path, place, trouble or str(error.strerror))
    return Disk(
        role,
        path,
        place,
        trouble,
        free=space.f_bavail * space.f_frsize,
        total=space.f_blocks * space.f_frsize,
        inodes_free=space.f_favail,
        inodes=space.f_files,
        noexec=bool(space.f_flag & os.ST_NOEXEC),
    )


def _cannot_write(folder: str) -> str:
    """Return why nothing can be written to a directory; only this shows quotas and full disks."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"saferun" * 1024)
            file.flush()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return ""  # a limit of this process, not of the disk
        return str(error.strerror or error)
    return ""


def memory() -> Memory:
    """Return memory and processors, and the part that our control group may use.

    Sizes are in bytes; -1 where one is unknown.
    """
    fields = {}
    for line in proc.text("/proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        kib = value.split()[:1]
        fields[name] = int(kib[0]) * 1024 if kib and kib[0].isdecimal() else -1
    group = cgroup.memory()
    shm_total = shm_free = -1
    with contextlib.suppress(OSError):
        space = os.statvfs("/dev/shm")  # noqa: S108 - only read
        shm_total, shm_free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    return Memory(
        total=fields.get("MemTotal", -1),
        available=fields.get("MemAvailable", -1),
        limit=group.limit,
        used=group.used,
        shm_total=shm_total,
        shm_free=shm_free,
        cpus=len(os.sched_getaffinity(0)),
        quota=cgroup.cpu_quota(),
    )


def limits() -> Limits:
    """Return the limits of this process, which a job inherits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        files=soft,
        files_hard=hard,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
    )


def clock() -> Clock:
    """Return the year, and whether the clock is synchronised (adjtimex(2))."""
    year = time.gmtime().tm_year
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return Clock(year)
    return Clock(year, None if state < 0 else state != _TIME_ERROR)


def tools(environ: Mapping[str, str]) -> Tools:
    """Return the compilers that torch.compile would start.

    Triton takes CC, else gcc, else clang (triton/runtime/build.py); Inductor on a CPU takes CXX,
    else g++ (torch/_inductor/config.py).
    """

    def first(*names: str) -> str:
        found = (paths.on_path(os.path.expanduser(name), environ) for name in names if name)
        return next(itertools.chain.from_iterable(found), "")

    given, given_cxx = environ.get("CC", ""), environ.get("CXX", "")
    return Tools(
        cc=first(given.split()[0]) if given.strip() else first("gcc", "clang"),
        cxx=first(given_cxx.split()[0]) if given_cxx.strip() else first("g++"),
        ptxas=first(environ.get("TRITON_PTXAS_PATH", "") or "ptxas"),
    )


def examine(environ: Mapping[str, str], cwd: str, timeout_s: float) -> Host:
    """Collect all facts of this module.

    Args:
        environ: the environment of the jobs that will run.
        cwd: the directory where they will run.
        timeout_s: longest time for the disks, in seconds.
    """
    return Host(
        disks=disks(directories(environ, cwd), timeout_s),
        memory=memory(),
        limits=limits(),
        clock=clock(),
        tools=tools(environ),
        numa=numa(),
    )


def numa(nodes: str = "/sys/devices/system/node") -> dict[int, int]:
    """Return how many CPUs this process may use on each NUMA node that has CPUs.

    Args:
        nodes: the kernel's directory of nodes.
    """
    allowed = os.sched_getaffinity(0)
    found = {}
    for name in proc.names(nodes):
        number = name.removeprefix("node")
        cpus = procfs.numbers(proc.text(f"{nodes}/{name}/cpulist")) if number.isdecimal() else set()
        if cpus:
            found[int(number)] = len(cpus & allowed)
    return found
