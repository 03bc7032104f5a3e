"""What /proc says of a process, and reading files of /proc and /sys.

A process may end at any moment, and most of /proc/PID is for its user alone. What cannot be read
has the answer of what says nothing, whatever the reason: the process is gone (ENOENT, ESRCH), or
another user's or a zombie, whose files the kernel refuses to all but root (EACCES, EPERM).

Every rank may load this file: it imports nothing but os.
"""

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    Pid = int | str  # "self", too

_PIECE_BYTES = 1 << 16
_MOST_BYTES = 3 << 20  # most that is read of a file; a busy machine's table of sockets is that long


def data(path: str, most: int = _MOST_BYTES) -> bytes:
    """Return the beginning of a file of /proc or /sys; b"" if it cannot be read.

    Args:
        path: the file's path.
        most: the most bytes that are read.
    """
    pieces = []
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while most > 0 and (piece := os.read(descriptor, min(most, _PIECE_BYTES))):
                pieces.append(piece)
                most -= len(piece)
        finally:
            os.close(descriptor)
    except OSError:
        return b""
    return b"".join(pieces)


def text(path: str) -> str:
    """Return the beginning of a file of /proc or /sys; "" if it cannot be read."""
    return data(path).decode("utf-8", "replace")


def names(folder: str) -> "list[str]":
    """Return the names in a directory of /proc or /sys, sorted; [] if it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def link(path: str) -> str:
    """Return the target of a link in /proc; "" if it cannot be read."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def pids() -> "list[int]":
    """Return all processes that /proc shows. Raises OSError if it cannot be read."""
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def stat(pid: "Pid") -> "list[str] | None":
    """Return the fields of /proc/PID/stat from the state on (proc_pid_stat(5)); None if gone."""
    return data(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split() or None


def start(pid: "Pid") -> "int | None":
    """Return when a process started, in clock ticks since boot; None if it is gone or a zombie."""
    fields = stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def environ_data(pid: "Pid", most: int = _MOST_BYTES) -> bytes:
    """Return the variables with which a process was started, as NAME=VALUE, each ended by a zero.

    Args:
        pid: the process.
        most: the most bytes that are read.
    """
    return data(f"/proc/{pid}/environ", most)


def environ(pid: "Pid", most: int = _MOST_BYTES) -> "dict[str, str]":
    """Return the variables with which a process was started; {} if they cannot be read whole.

    Args:
        pid: the process.
        most: the most bytes that they take.
    """
    found = environ_data(pid, most + 1)
    words = map(os.fsdecode, found.split(b"\0") if len(found) <= most else ())
    return dict(word.split("=", 1) for word in words if "=" in word)


def command(pid: "Pid") -> "list[str]":
    """Return the command line of a process; [] if it cannot be read."""
    return [os.fsdecode(word) for word in data(f"/proc/{pid}/cmdline").split(b"\0")[:-1]]


def descriptors(pid: "Pid") -> "dict[int, str]":
    """Return the open descriptors of a process and their targets, as far as they can be read."""
    folder = f"/proc/{pid}/fd"
    found = {int(name): link(f"{folder}/{name}") for name in names(folder)}
    return {number: target for number, target in found.items() if target}


def boot() -> str:
    """Return the id of the machine's boot; "" if it cannot be read."""
    return text("/proc/sys/kernel/random/boot_id").strip()


def namespace(pid: "Pid", kind: str) -> str:
    """Return a namespace of a process, such as "pid:[4026531836]"; "" if it cannot be read."""
    return link(f"/proc/{pid}/ns/{kind}")


def own_place() -> str:
    """Return where a pid and a start time of ours count; "" if that cannot be read.

    It is our pid namespace and, from Linux 5.6 on, our time namespace, which shifts start times.
    """
    pids, times = namespace("self", "pid"), namespace("self", "time")
    return f"{pids} {times}".rstrip() if pids else ""
