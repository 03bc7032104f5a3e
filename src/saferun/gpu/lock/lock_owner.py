"""The holder of a lock: its record for all users, and whether the record can be true.

The file's owner proves the user; the process must live, have begun at the recorded time and belong
to that user. Any other record is ignored.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from saferun.base import proc
from saferun.gpu.lock.lock_dir import OPEN, LockDirectory, Umask
from saferun.system import procfs
from saferun.system.printable import printable

RECORDS = 512  # most records of other runs that are read; more would be a flood
RECORD_BYTES = 1 << 14
_TEXT = 200  # most characters of a text in a record


class Holder(NamedTuple):
    """A run as described in its record to everybody on the machine."""

    pid: int
    start: int  # start of the process: /proc/<pid>/stat, field 22, in clock ticks since boot
    host: str
    command: str  # readable by all users: the script without its arguments
    since: float  # seconds since the epoch
    run: str


class OwnerRecord(NamedTuple):
    """The content of a holder's file, whose owner is verified."""

    holder: Holder
    file: str
    uid: int
    slots: int
    devices: tuple[str, ...]
    files: tuple[str, ...]  # lock files that it holds
    alive: bool


def this_process(command: str, run: str) -> Holder:
    """Return this process as a holder.

    Args:
        command: the program; every user of the machine may read it, so leave out its arguments.
        run: the run's id.
    """
    pid = os.getpid()
    return Holder(
        pid=pid,
        start=proc.start(pid) or 0,
        host=os.uname().nodename,
        command=command,
        since=time.time(),
        run=run,
    )


def describe_holder(record: OwnerRecord) -> str:
    """Describe a holder for people; the user is the file's owner, whatever the file claims."""
    holder = record.holder
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder.since))
    text = f"pid {holder.pid} of user {user_name(record.uid)} ({holder.command}, since {since}"
    text += f", run {holder.run})" if holder.run else ")"
    return text if record.alive else f"what {text}, now ended, has left running"


def write(
    place: LockDirectory, owner: Holder, slots: int, devices: Sequence[str], files: Iterable[str]
) -> str:
    """Write our record into a new file of our own; return its name.

    Args:
        place: the lock directory.
        owner: this process.
        slots: number of runs that may share a GPU, in this run's settings.
        devices: the GPUs' names.
        files: the lock files that this process holds.
    """
    name = f"holder.{os.geteuid()}.{owner.pid}.{os.urandom(4).hex()}.json"
    content = {
        "schema": 1,
        **owner._asdict(),
        "pids": procfs.this_process()["pids"],
        "slots": slots,
        "devices": list(devices),
        "files": sorted(files),
    }
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | OPEN
    with Umask():
        descriptor = os.open(name, flags, 0o644, dir_fd=place.descriptor)
    try:
        data = json.dumps(content).encode()
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
    except BaseException:
        unlink(place, name)
        raise
    finally:
        os.close(descriptor)
    return name


def read_all(place: LockDirectory, names: frozenset[str]) -> Iterator[OwnerRecord]:
    """Read the records that can be true."""
    for name in sorted(n for n in names if n.startswith("holder."))[:RECORDS]:
        record = _read(place, name)
        if record is not None:
            yield record


def _read(place: LockDirectory, name: str) -> OwnerRecord | None:
    """Read one record; None for garbage, a planted link, another host's or a forged one."""
    try:
        descriptor = os.open(name, os.O_RDONLY | OPEN, dir_fd=place.descriptor)
        try:
            status = os.fstat(descriptor)
            data = os.read(descriptor, RECORD_BYTES)
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & 0o022 or status.st_nlink != 1:
            return None
        content = json.loads(data)
        record = parse_record(content, name, status.st_uid)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    if record.holder.host != os.uname().nodename:
        return None
    if content.get("pids") not in (None, "", procfs.this_process()["pids"]):
        return record._replace(alive=True)  # of a container: its locks prove more than its pid
    pid = record.holder.pid
    lives = procfs.lives_since(pid, record.holder.start) is True
    if lives and proc.start(pid) and status.st_uid not in procfs.uids(pid):
        return None  # it names another user's process
    return record._replace(alive=lives)


def parse_record(content: Any, file: str, uid: int) -> OwnerRecord:
    """Make a record from decoded JSON; the caller determines `alive`.

    Args:
        content: the decoded JSON.
        file: the record's file name.
        uid: the file's owner.

    Raises:
        ValueError, TypeError, KeyError, OverflowError: it is not a record of saferun.
    """
    slots, since = content["slots"], content["since"]
    if type(slots) is not int or type(content["pid"]) is not int or min(slots, content["pid"]) < 1:
        raise ValueError(file)
    time.localtime(since)  # raises for a time that cannot be shown
    holder = Holder(
        pid=content["pid"],
        start=content["start"],
        host=content["host"],
        command=printable(content["command"], _TEXT),
        since=since,
        run=printable(content["run"], _TEXT),
    )
    devices, files = (tuple(map(str, content[key])) for key in ("devices", "files"))
    return OwnerRecord(holder, file, uid, slots, devices, files, alive=False)


def unlink(place: LockDirectory, name: str) -> None:
    """Remove a record; it may already be gone."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=place.descriptor)


def user_name(uid: int) -> str:
    """Return a user's name, or the number if the machine has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
