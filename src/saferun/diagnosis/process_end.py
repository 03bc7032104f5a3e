"""Describe in words how a signal ended a process, from torchrun's report."""

from __future__ import annotations

import re

from saferun.base.signal_names import name_of

# "failed (exitcode: -6) local_rank: 0 (pid: 25495) of binary"; "exitcode  : -6 (pid: 25495)"
_ENDED = re.compile(
    r"exitcode\s{0,4}:\s{0,3}-(?P<number>\d{1,2})\b\)?"
    r"(?:\s{1,3}local_rank:\s{0,3}\d{1,6})?(?:\s{1,3}\(pid:\s{0,3}(?P<pid>\d{1,9})\))?"
)
_KILL = 9


def by_signal(line: str) -> str:
    """Return a signal's end of a process, from a line of torchrun; "" for any other line.

    >>> by_signal("failed (exitcode: -6) local_rank: 0 (pid: 25495) of binary: python")
    'ended by SIGABRT (pid 25495)'
    """
    found = _ENDED.search(line)
    if found is None:
        return ""
    pid = f" (pid {found['pid']})" if found["pid"] else ""
    return f"ended by {name_of(int(found['number']))}{pid}"


def launcher_end(number: int, *, torchrun: bool) -> str:
    """Return a clause that says by which signal the attempt's first process died.

    Args:
        number: the signal's number.
        torchrun: the process was torchrun, not the script itself.
    """
    who = "torchrun itself" if torchrun else "the script's process"
    ended = "was killed (SIGKILL)" if number == _KILL else f"ended by {name_of(number)}"
    return f"{who} {ended}"
