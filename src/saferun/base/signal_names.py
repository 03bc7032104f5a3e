"""Pure: the names of signals. `signal` has them, too, but costs 2 ms to import."""

# From signal(7), for 1 and up; the numbers are those of x86 and ARM.
_NAMES = (
    *("HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2"),
    *("PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG"),
    *("XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS"),
)
NUMBERS = {f"SIG{name}": number for number, name in enumerate(_NAMES, 1)}
_BY_NUMBER = {number: name for name, number in NUMBERS.items()}


def name_of(number: int) -> str:
    """Return a signal's name, or "signal N" if it has none.

    >>> name_of(9), name_of(40)
    ('SIGKILL', 'signal 40')
    """
    return _BY_NUMBER.get(number, f"signal {number}")
