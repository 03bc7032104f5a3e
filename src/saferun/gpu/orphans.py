"""The processes that hold the GPUs, and which of them an ended run of saferun has left.

A process is a leftover if all of this is certain: it is ours (the same user and pid namespace); a
saferun of this user started it (its environment names the run, and the run's journal names the
saferun); every saferun named there has ended; and it began while the run still lived, since a
program that a user starts by hand in a server (tmux, Jupyter) that a run left behind has the same
environment. Without such proof a process is somebody's work, and is left alone. Usually there are
no leftovers: the keeper ends an attempt when its saferun ends, so both must be killed at the same
time.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping

from saferun.base import files, proc
from saferun.gpu.device_names import VARIABLE as LOCKS
from saferun.inject import contract
from saferun.journal import events
from saferun.journal.event_types import AttemptBegun, WorkersBegun
from saferun.journal.run_directory import ALIVE_FILE
from saferun.keeper.process_tree import end_processes
from saferun.system import paths, procfs

CACHE = "saferun-cache-"  # prefix from supervise/changes/probes.py
CACHE_AGE_S = 600.0  # a younger cache may belong to a run that is just starting
_ENVIRON_BYTES = 1 << 20
NVIDIA_MAJOR = 195  # Documentation/admin-guide/devices.txt of Linux
NO_GPU = 254  # minors from here on are the driver's: nvidia-modeset, nvidiactl


def openers(minors: Iterable[int] | None, dev: str = "/dev") -> dict[int, int]:
    """Return {pid: start time} of the processes that have a GPU's device node open.

    Args:
        minors: the nodes' minor numbers; None for all GPUs.
        dev: the directory of the nodes.

    Only root sees other users' processes.
    """
    wanted = None if minors is None else frozenset(minors)
    found = {}
    for pid in proc.pids():
        start = proc.start(pid)  # read before the look: the pid may be another process's later
        if start is not None and _has_node(pid, wanted, dev):
            found[pid] = start
    return found


def _has_node(pid: int, wanted: frozenset[int] | None, dev: str) -> bool:
    """Return whether a process has one of the GPUs open, or any GPU."""
    files = proc.descriptors(pid).items()
    return any(_is_node(f"/proc/{pid}/fd/{fd}", path, wanted, dev) for fd, path in files)


def _is_node(place: str, path: str, wanted: frozenset[int] | None, dev: str) -> bool:
    """Return whether an open file is a GPU's node, by its number: a container may rename it."""
    if not path.startswith(f"{dev}/") and not re.search(r"/nvidia\d+$", path):
        return False  # no other path is examined: it may be on a dead file server
    try:
        status = os.stat(place)
    except OSError:
        return False
    if stat.S_ISCHR(status.st_mode):
        number = os.minor(status.st_rdev) if os.major(status.st_rdev) == NVIDIA_MAJOR else NO_GPU
    else:  # not a kernel device: a sandbox, or a fake
        named = re.fullmatch(rf"{re.escape(dev)}/nvidia(\d{{1,3}})", path)
        number = int(named[1]) if named else NO_GPU
    return number < NO_GPU and (wanted is None or number in wanted)


def is_leftover(pid: int, started: int, runs: str) -> bool:
    """Return whether an ended saferun run has certainly left this process.

    Args:
        pid: the process.
        started: when it started, in clock ticks since boot (`openers`).
        runs: the directory of the runs' journals, if the process's environment names none.
    """
    if pid == os.getpid() or procfs.uids(pid) != {os.geteuid()} or not _same_namespace(pid):
        return False
    environ = proc.environ(pid, _ENVIRON_BYTES)
    folder = _journal(environ.get(contract.VARIABLE, ""), runs)
    owners = _ended_owners(folder) if paths.is_private(folder) else set()
    named = {_owner(entry) for entry in environ.get(LOCKS, "").split(";") if entry}
    return bool(owners) and named <= owners and started < _last_alive(folder)


def _owner(entry: str) -> tuple[int, int] | None:
    """Return pid and start time of an entry of SAFERUN_LOCKS; None for garbage."""
    pid, _, rest = entry.partition(":")
    start = rest.partition(":")[0]
    whole = re.fullmatch(r"\d{1,10}:\d{1,20}", f"{pid}:{start}", re.ASCII)
    return (int(pid), int(start)) if whole else None


def _journal(injected: str, runs: str) -> str:
    """Return the directory of a process's run, which its SAFERUN_INJECT names; "" if not."""
    try:
        document = contract.decode(injected)
    except ValueError:
        return ""
    run, receipts = str(document["run"]), document["receipts"]
    if isinstance(receipts, str) and os.path.isabs(receipts) and not receipts.startswith("/proc/"):
        return os.path.dirname(receipts)
    is_name = run and run == os.path.basename(run) and not run.startswith(".")
    return os.path.join(runs, run) if is_name and runs else ""


def _ended_owners(folder: str) -> set[tuple[int, int]]:
    """Return pid and start time of each saferun of a run; empty unless all are certainly gone.

    A record from another boot or pid namespace names a process that cannot be checked from here.
    """
    begun = [event.facts for event in events.read(folder)]
    runners = [facts.by for facts in begun if isinstance(facts, (AttemptBegun, WorkersBegun))]
    recorded = [by for by in runners if by is not None]
    if not all(procfs.is_of_here(by) and procfs.lives(by) is False for by in recorded):
        return set()
    return {(by["pid"], start) for by in recorded if (start := by["start"]) is not None}


def _last_alive(folder: str) -> int:
    """Return when a run last noted that it lives, in clock ticks since boot; 0 if never."""
    content = files.read_private(os.path.join(folder, ALIVE_FILE), 32) or b""
    return int(content) if re.fullmatch(rb"\d{1,20}\n", content) else 0


def _same_namespace(pid: int) -> bool:
    theirs = proc.namespace(pid, "pid")
    return theirs != "" and theirs == proc.namespace("self", "pid")


def end(wanted: Mapping[int, int], limit_s: float) -> tuple[int, list[int]]:
    """Kill leftovers after freezing all of them; return how many ended and which live on.

    Args:
        wanted: pid -> start time, read before they were judged to be leftovers.
        limit_s: time limit for all of them together, in seconds.
    """

    def living() -> dict[int, int]:
        return {pid: start for pid, start in wanted.items() if proc.start(pid) == start}

    return end_processes(living, limit_s)


# --- caches -------------------------------------------------------------------------------------


def remove_stale_caches(folder: str) -> list[str]:
    """Remove saferun's caches in a directory that no run uses; return the removed ones.

    A cache is stale if it is old, unlocked and in no process's environment. The lock is a flock(2)
    on the cache's directory itself, which its run (supervise/changes/probes.py) holds shared:
    filelock has no shared flock(2) and does not lock directories. We hold the lock during the
    removal, so that no run takes the cache in that time.
    """
    gone = []
    for path in _old_caches(folder):
        claim = _claimed_alone(path)
        if claim is None:
            continue
        try:
            if not _in_environments(path):
                import shutil  # 3 ms; only leftovers of a killed run need it

                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(claim)
        if not os.path.lexists(path):
            gone.append(path)
    return gone


def _old_caches(folder: str) -> list[str]:
    try:
        names = [name for name in os.listdir(folder) if name.startswith(CACHE)]
    except OSError:
        return []
    paths = [os.path.join(folder, name) for name in sorted(names)]
    return [path for path in paths if _is_old_and_ours(path)]


def _in_environments(path: str) -> bool:
    """Return whether a process's environment contains this path, or is too large to know."""
    found = (proc.environ_data(pid, _ENVIRON_BYTES) for pid in proc.pids())
    return any(len(one) == _ENVIRON_BYTES or os.fsencode(path) in one for one in found)


def _is_old_and_ours(path: str) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    private = (status.st_mode & 0o170077) == 0o040000 and status.st_uid == os.geteuid()
    return private and time.time() - status.st_mtime > CACHE_AGE_S


def _claimed_alone(path: str) -> int | None:
    """Return a descriptor that holds the cache's lock exclusively; None if a run has it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
