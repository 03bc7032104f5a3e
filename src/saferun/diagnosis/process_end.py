"""Describe in words how a signal ended a process, from torchrun's report."""

from __future__ import annotations

import re

from saferun.base.signal_names import NUMBERS, name_of

# "failed (exitcode: -6) local_rank: 0 (pid: 25495) of binary"; "exitcode  : 143 (pid: 25495)"
_ENDED = re.compile(
    r"exitcode\s{0,4}:\s{0,3}(?P<code>-?\d{1,3})\b\)?"
    r"(?:\s{1,3}local_rank:\s{0,3}\d{1,6})?(?:\s{1,3}\(pid:\s{0,3}(?P<pid>\d{1,9})\))?"
)
_SHELLS = (
    128  # a shell, and a program that handles a signal, ends with this and the signal's number
)
_LAST_OF_SHELLS = 31
# These end no process: SIGCHLD, SIGCONT, SIGSTOP, SIGTSTP, SIGTTIN, SIGTTOU, SIGURG, SIGWINCH
# (https://man7.org/linux/man-pages/man7/signal.7.html). So a script chose a status made of them.
_HARMLESS = (17, 18, 19, 20, 21, 22, 23, 28)
_KILL, _TERM = 9, 15


def signal_of(code: int) -> int:
    """Return the number of the signal behind an exit code, wherever that comes from; 0 for none.

    >>> [signal_of(code) for code in (-15, 143, 1, 128, 146, 160)]
    [15, 15, 0, 0, 0, 0]
    """
    number = -code if code < 0 else code - _SHELLS
    return 0 if number in _HARMLESS or not (code < 0 or 0 < number <= _LAST_OF_SHELLS) else number


def by_signal(line: str) -> str:
    """Return a signal's end of a process, from a line of torchrun; "" for any other line.

    >>> by_signal("failed (exitcode: -6) local_rank: 0 (pid: 25495) of binary: python")
    'ended by SIGABRT (pid 25495)'
    >>> by_signal("  exitcode  : 143 (pid: 7)")
    'ended with status 143, as after SIGTERM (pid 7)'
    """
    found = _ENDED.search(line)
    code = int(found["code"]) if found else 0
    if found is None or not signal_of(code):
        return ""
    pid = f" (pid {found['pid']})" if found["pid"] else ""
    how = "by" if code < 0 else f"with status {code}, as after"
    return f"ended {how} {name_of(signal_of(code))}{pid}"


def launcher_end(number: int, *, torchrun: bool) -> str:
    """Return a clause that says by which signal the attempt's first process died.

    Args:
        number: the signal's number.
        torchrun: the process was torchrun, not the script itself.
    """
    who = "torchrun itself" if torchrun else "the script's process"
    ended = "was killed (SIGKILL)" if number == _KILL else f"ended by {name_of(number)}"
    return f"{who} {ended}"


def number_of(name: str) -> int:
    """Return a signal's number; that of SIGTERM where the name is of none that ends a process."""
    return signal_of(-NUMBERS.get(name.upper(), 0)) or _TERM
