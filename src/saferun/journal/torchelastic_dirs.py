"""Remove torchrun's directories for error files, with the files that saferun's hooks left there.

Without `--log-dir` torchrun makes `<temporary directory>/torchelastic_XXXXXXXX` and in it
`<rendezvous id>_XXXXXXXX/attempt_N/RANK` (torch/distributed/elastic/multiprocessing/api.py, 2.4 to
2.13), and never removes them. A rank names its directory in its first receipt. Files of others
stay: logs of `--redirects` and `--tee`, and the output of `@record`.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable

from saferun.inject import contract
from saferun.journal.receipts import Receipt
from saferun.system import paths

_FILE = re.compile(
    r"(/(?:[^\0]{1,4000}/)?torchelastic_[a-z0-9_]{8})/[^/]{1,255}/attempt_\d{1,9}/\d{1,9}/error\.json"
)
_OWN = b'"time_s"'  # written by inject/hooks/excepthook.py, but not by torch
_MOST_BYTES = 1 << 20  # most read of an error file
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def remove(receipts: Iterable[Receipt]) -> None:
    """Remove directories named in the ranks' receipts that contain only saferun's own files.

    The directory of a job that was detached on purpose, and so is still running, stays.
    """
    named = [(path, receipt.pid) for receipt in receipts if (path := _place(receipt))]
    used = {path for path, pid in named if os.path.exists(f"/proc/{pid}")}
    for path in sorted({path for path, _ in named} - used):
        with contextlib.suppress(OSError):  # it is gone, or not empty
            paths.remove_dir(path, _empty)


def _place(receipt: Receipt) -> str | None:
    file = receipt.facts.get(contract.ERROR_FILE) if receipt.hook == contract.BOOTSTRAP else None
    match = _FILE.fullmatch(file) if isinstance(file, str) else None
    return match[1] if match else None


def _empty(top: int) -> None:
    """Remove our own files and the directories that are then empty.

    Raises:
        PermissionError: others can write to the directory.
    """
    status = os.fstat(top)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(1, "it is not ours alone")
    for _, folders, files, folder in os.fwalk(".", topdown=False, dir_fd=top):
        for name in files:
            if name == "error.json" and _is_own(name, folder):
                os.unlink(name, dir_fd=folder)
        for name in folders:
            with contextlib.suppress(OSError):  # not empty, or a link
                os.rmdir(name, dir_fd=folder)


def _is_own(name: str, folder: int) -> bool:
    try:
        descriptor = os.open(name, _READ, dir_fd=folder)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(descriptor).st_mode) and _OWN in os.read(
            descriptor, _MOST_BYTES
        )
    finally:
        os.close(descriptor)
