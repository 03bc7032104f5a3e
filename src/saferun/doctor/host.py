"""Ask the machine about what a job needs beside GPUs: disks, memory, limits, clock, compilers.

A file system that hangs (a dead NFS server) hangs whoever asks it, so each directory is asked in a
thread of its own that nobody waits for beyond the clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import resource
import tempfile
import threading
import time
from collections.abc import Mapping

from saferun.doctor import files
from saferun.doctor.vitals import Clock, Disk, Host, Limits, Memory, Tools
from saferun.system import command as bounded

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_UNLIMITED_V1 = 1 << 60  # cgroup v1 writes "no limit" as a number near 2^63
_HANGS = "it does not answer (a hanging file system?)"


def directories(environ: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Return the directories that a job writes to, by what for.

    Sources: torch/_inductor/runtime/cache_dir_utils.py (`default_cache_dir`, `triton_cache_dir`),
    triton/knobs.py (`~/.triton/cache`), huggingface_hub/constants.py (`HF_HOME`).
    """
    home = environ.get("HOME") or os.path.expanduser("~")
    cache = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    temporary = next((environ[n] for n in ("TMPDIR", "TEMP", "TMP") if environ.get(n)), "/tmp")  # noqa: S108 - its room is asked for
    inductor = os.path.join(temporary, f"torchinductor_{_user(environ)}")
    hub = environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    found = {
        "working directory": cwd,
        "temporary files": temporary,
        "compile cache": environ.get("TORCHINDUCTOR_CACHE_DIR") or inductor,
        "Triton's cache": environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache"),
        "models and data sets": environ.get("HF_HUB_CACHE") or hub,
    }
    return {role: os.path.normpath(os.path.join(cwd, path)) for role, path in found.items()}


def _user(environ: Mapping[str, str]) -> str:
    """The name as getpass.getuser has it."""
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        if environ.get(name):
            return environ[name]
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"uid_{os.getuid()}"


def disks(folders: Mapping[str, str], timeout_s: float) -> tuple[Disk, ...]:
    """Ask about each directory; one that does not answer in time is said to hang."""
    answers: queue.SimpleQueue[Disk] = queue.SimpleQueue()

    def ask(role: str, path: str) -> None:
        answers.put(disk(role, path))

    for role, path in folders.items():
        threading.Thread(target=ask, args=(role, path), daemon=True).start()
    found: dict[str, Disk] = {}
    end = time.monotonic() + timeout_s
    while len(found) < len(folders):
        try:
            answer = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        found[answer.role] = answer
    return tuple(
        found.get(role) or Disk(role, path, path, _HANGS) for role, path in folders.items()
    )


def disk(role: str, path: str) -> Disk:
    """Say what a directory has room for; a nameless file is made in it and gone at once."""
    place = path
    while not os.path.isdir(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    trouble = _cannot_write(place)
    if not trouble and os.path.lexists(path) and not os.path.isdir(path):
        trouble = "it is not a directory"
    try:
        room = os.statvfs(place)
    except OSError as error:
        return Disk(role, path, place, trouble or str(error.strerror))
    return Disk(
        role,
        path,
        place,
        trouble,
        free=room.f_bavail * room.f_frsize,
        total=room.f_blocks * room.f_frsize,
        inodes_free=room.f_favail,
        inodes=room.f_files,
        noexec=bool(room.f_flag & os.ST_NOEXEC),
    )


def _cannot_write(folder: str) -> str:
    """Return why nothing can be written into a directory; quotas and full disks show only here."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"saferun" * 1024)
            file.flush()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return ""  # our own shortage
        return str(error.strerror or error)
    return ""


def memory(proc: str = "/proc", groups: str = "/sys/fs/cgroup", shm: str = "/dev/shm") -> Memory:  # noqa: S108 - looked at, not written to
    """Return memory and processors, and what our control group may have of them."""
    fields = {}
    for line in files.text(f"{proc}/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        fields[name] = int(words[0]) * 1024 if words and words[0].isdecimal() else -1
    limit, used = _group_memory(proc, groups)
    shm_total = shm_free = -1
    with contextlib.suppress(OSError):
        room = os.statvfs(shm)
        shm_total, shm_free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    return Memory(
        total=fields.get("MemTotal", -1),
        available=fields.get("MemAvailable", -1),
        limit=limit,
        used=used,
        shm_total=shm_total,
        shm_free=shm_free,
        cpus=len(os.sched_getaffinity(0)),
        quota=_quota(proc, groups),
    )


def _chain(proc: str, groups: str, controller: str) -> tuple[list[str], bool]:
    """Return our control group's directories, innermost first, and whether it is version 2.

    In a container the path may be one that is not shown here: its end is the mount itself.
    """
    for line in files.text(f"{proc}/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        named = controller in controllers.split(",")
        if not named and (number != "0" or not os.path.exists(f"{groups}/cgroup.controllers")):
            continue
        base = f"{groups}/{controller}" if named else groups
        parts = [part for part in path.split("/") if part and part != ".."]
        tails = ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]
        return [os.path.join(base, tail) for tail in tails], not named
    return [], True


def _group_memory(proc: str, groups: str) -> tuple[int, int]:
    """Return the tightest memory limit above us and what is used of it."""
    folders, second = _chain(proc, groups, "memory")
    names = ("memory.max", "memory.current")
    if not second:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    tightest = (-1, -1)
    for folder in folders:
        limit, used = (_number(f"{folder}/{name}") for name in names)
        if 0 <= limit < _UNLIMITED_V1 and (tightest[0] < 0 or limit < tightest[0]):
            tightest = (limit, used)
    return tightest


def _quota(proc: str, groups: str) -> float:
    """Return the tightest limit of CPU time above us, in CPUs; 0 without one."""
    folders, second = _chain(proc, groups, "cpu")
    found = []
    for folder in folders:
        if second:
            words = files.text(f"{folder}/cpu.max").split()
        else:
            words = [
                files.text(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")
            ]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=0.0)


def limits() -> Limits:
    """Return this process's limits, which a job inherits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        files=soft,
        files_hard=hard,
        locked=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
    )


def clock() -> Clock:
    """Return the year and whether something keeps the clock right, by adjtimex(2)."""
    year = time.gmtime().tm_year
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return Clock(year)
    return Clock(year, None if state < 0 else state != _TIME_ERROR)


def tools(environ: Mapping[str, str]) -> Tools:
    """Find the compilers that torch.compile would start.

    Triton takes CC, else gcc, else clang (triton/runtime/build.py); Inductor on a CPU takes CXX,
    else g++ (torch/_inductor/config.py).
    """

    def first(*names: str) -> str:
        found = (bounded.on_path(os.path.expanduser(name), environ) for name in names if name)
        return next((path for path in found if path), "")

    given, given_cxx = environ.get("CC", ""), environ.get("CXX", "")
    return Tools(
        cc=first(given.split()[0]) if given.strip() else first("gcc", "clang"),
        cxx=first(given_cxx.split()[0]) if given_cxx.strip() else first("g++"),
        ptxas=first(environ.get("TRITON_PTXAS_PATH", "") or "ptxas"),
    )


def look(environ: Mapping[str, str], cwd: str, timeout_s: float) -> Host:
    """Ask all of it."""
    return Host(
        disks=disks(directories(environ, cwd), timeout_s),
        memory=memory(),
        limits=limits(),
        clock=clock(),
        tools=tools(environ),
    )


def _number(path: str) -> int:
    text = files.text(path).strip()
    return int(text) if text.isdecimal() else -1
