"""Execute a program as the keeper's child, so that it dies with the keeper.

This module uses only the standard library.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from saferun.base import prctl
from saferun.keeper import libc_signals, protocol

DEATH_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
# Signals that a keeper ignores; the job ignores only those of `Start.ignored`.
KEEPER_IGNORES = (
    *DEATH_SIGNALS,
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE, signal.SIGXFSZ),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGWINCH),
)
_NOT_EXECUTED = 127  # status of a child that could not execute the program


def start_program(
    program: protocol.Start, files: Sequence[int], inherited: Sequence[int] = ()
) -> int:
    """Fork and execute a program.

    Args:
        program: the program, and the differences of its process from the keeper's.
        files: descriptors that become its 1 and 2.
        inherited: further descriptors that it gets.

    Returns:
        The program's pid.

    Raises:
        OSError: the program could not be executed.
    """
    reading, writing = os.pipe()
    keeper = os.getpid()
    pid = os.fork()
    if not pid:
        try:
            _execute(program, files, inherited, keeper)
        except OSError as error:
            os.write(writing, b"%d" % (error.errno or 0))
        finally:
            os._exit(_NOT_EXECUTED)
    os.close(writing)
    failure = os.read(reading, 32)
    os.close(reading)
    if failure:
        os.waitpid(pid, 0)
        raise OSError(int(failure), os.strerror(int(failure)), program.argv[0])
    return pid


def _execute(
    program: protocol.Start, files: Sequence[int], inherited: Sequence[int], keeper: int
) -> None:
    if program.own_group:
        os.setpgid(0, 0)
    for number, file in enumerate(files, 1):
        os.dup2(file, number, inheritable=True)
    for file in inherited:
        os.set_inheritable(file, True)
    for number in (*KEEPER_IGNORES, signal.SIGCHLD):
        ignored = number in program.ignored
        signal.signal(number, signal.SIG_IGN if ignored else signal.SIG_DFL)
    libc_signals.restore(program.ignored)
    for name, most in program.limits.items():
        _raise_limit(name, most)
    prctl.die_with_parent()
    if os.getppid() != keeper:
        os._exit(_NOT_EXECUTED)  # the keeper died before PDEATHSIG was set: no signal would come
    signal.pthread_sigmask(signal.SIG_SETMASK, program.blocked)
    os.execvpe(program.argv[0], program.argv, program.env)  # noqa: S606 (no shell is what we want)


def _raise_limit(name: str, wanted: int) -> None:
    import resource  # only if a mitigation needs it

    limit = getattr(resource, f"RLIMIT_{name.upper()}")
    soft, hard = resource.getrlimit(limit)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(limit, (most, hard))


def release_inherited() -> None:
    """Release stdin and the directory: a process that waits for them waits for the job."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.chdir("/")
