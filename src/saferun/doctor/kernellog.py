"""Read the kernel's log of this boot: directly where we may, else through journald.

/dev/kmsg gives one record a read, this boot's only
(https://docs.kernel.org/admin-guide/abi-testing.html, dev-kmsg); `kernel.dmesg_restrict` and most
containers forbid it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from saferun.system import command as bounded

_RECORD = 8192  # bytes; a shorter buffer is refused
_RECORDS = 100_000
JOURNAL_S = 4.0


class Log(NamedTuple):
    """The lines of the driver and what speaks of it."""

    lines: tuple[str, ...] = ()
    source: str = ""  # "" where no log may be read
    trouble: str = ""


def read(environ: Mapping[str, str], path: str = "/dev/kmsg") -> Log:
    """Return the lines that name NVIDIA's driver (NVRM, nvidia-nvswitch)."""
    try:
        return Log(tuple(filter(_ours, _records(path))), path)
    except OSError as error:
        trouble = f"{path}: {error.strerror}"
    program = bounded.on_path("journalctl", environ)
    if program is None:
        return Log(trouble=trouble)
    words = (program, "--dmesg", "--boot=0", "--no-pager", "--quiet", "--output=cat")
    answer = bounded.run(words, environ, JOURNAL_S)
    if answer.trouble or not answer.out.strip():  # without the right, it says nothing and ends well
        return Log(trouble=f"{trouble}; journalctl: {answer.trouble or 'no kernel lines'}")
    return Log(tuple(filter(_ours, answer.out.splitlines())), "journalctl")


def _ours(line: str) -> bool:
    return "NVRM" in line or "nvidia-nvswitch" in line


def _records(path: str) -> list[str]:
    """Read records until there are no more; one that was overwritten meanwhile is skipped."""
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
