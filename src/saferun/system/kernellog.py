"""The kernel's log since boot, read directly if allowed, else through journald.

/dev/kmsg returns one record for each read, only since boot
(https://docs.kernel.org/admin-guide/abi-testing.html, dev-kmsg); `kernel.dmesg_restrict` and most
containers forbid it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

from saferun.system import command as bounded
from saferun.system import paths

_RECORD = 8192  # bytes; the kernel refuses a shorter buffer
_RECORDS = 100_000
JOURNAL_S = 4.0  # journalctl takes 0.1 s, or seconds over a large journal on a slow disk
_TIME = re.compile(r"\d{1,6},\d{1,20},(\d{1,20}),")
# Beginnings of the driver's own lines, after a record's head. Other lines contain names that users
# choose: the kernel prints a control group's name when it kills for lack of memory. If a program
# crashes, a record begins with its name, of at most 15 bytes, and `[PID]`.
_DRIVER = re.compile(
    r"(?:\d{1,6},\d{1,20},\d{1,20},[^;]{0,80};)?\s*(?!.{1,15}\[\d+\])(?:NVRM:|nvidia-nvswitch\d*:)"
)
_APART_S = 1.0  # possible difference between the clocks of the kernel's log and of the machine


class Log(NamedTuple):
    """The lines of NVIDIA's driver."""

    lines: tuple[str, ...] = ()
    source: str = ""  # "" if no log may be read
    trouble: str = ""


def read(
    environ: Mapping[str, str], path: str = "/dev/kmsg", *, since_s: float | None = None
) -> Log:
    """Return the lines of NVIDIA's driver (NVRM, nvidia-nvswitch).

    Args:
        environ: the environment; PATH finds journalctl.
        path: path of the kernel's log.
        since_s: seconds since the epoch; no older line is returned. None: all since boot.
    """
    try:
        return Log(tuple(r for r in _records(path) if _ours(r) and _is_since(r, since_s)), path)
    except OSError as error:
        trouble = f"{path}: {error.strerror}"
    program = next(paths.on_path("journalctl", environ), None)
    if program is None:
        return Log(trouble=trouble)
    command = [program, "--dmesg", "--boot=0", "--no-pager", "--quiet", "--output=json"]
    command += [] if since_s is None else [f"--since=@{int(since_s)}"]
    answer = bounded.run(command, environ, JOURNAL_S)
    # Without permission journalctl prints nothing and exits with 0.
    if answer.trouble or not answer.out.strip():
        return Log(trouble=f"{trouble}; journalctl: {answer.trouble or 'no kernel lines'}")
    return Log(tuple(filter(_ours, map(_message, answer.out.split("\n")))), "journalctl")


def _message(entry: str) -> str:
    """Return a message of the journal as one line; "" if there is none.

    journald undoes the kernel's escapes in a record: a program with a newline in its name could
    otherwise imitate lines of the driver. Bytes that are not text come as a list of numbers.
    """
    try:
        message = json.loads(entry)["MESSAGE"]
        text = bytes(message).decode("utf-8", "replace") if isinstance(message, list) else message
        return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    except (ValueError, TypeError, KeyError):
        return ""


def _is_since(record: str, since_s: float | None) -> bool:
    """Return whether a record is not older; its time is in microseconds since boot."""
    if since_s is None:
        return True
    found = _TIME.match(record)
    boot_s = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    return found is not None and boot_s + int(found[1]) / 1e6 >= since_s - _APART_S


def _ours(line: str) -> bool:
    return _DRIVER.match(line) is not None


def _records(path: str) -> list[str]:
    """Return all records; a record that was overwritten during the read is skipped."""
    found: list[str] = []
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        for _ in range(_RECORDS):
            try:
                record = os.read(descriptor, _RECORD)
            except BrokenPipeError:
                continue
            except BlockingIOError:
                break
            if not record:
                break
            found += record.decode("utf-8", "replace").splitlines()
    finally:
        os.close(descriptor)
    return found
