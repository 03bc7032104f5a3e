"""torchrun's agent: how it names itself to its ranks, and how a rank finds it.

The kernel ends a rank when the rank's agent ends. torchrun ends its ranks itself when it can; a
SIGKILL of torchrun leaves them all, with their GPU memory. The kernel reacts to the end of the
*thread* that started us: torchrun starts ranks from its main thread (torch/distributed/elastic, 2.4
to 2.13). Helpers of a rank, which any thread may start, are never tied to the agent.
"""

import os

from ..base import proc
from . import contract

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_SIGKILL = 9  # importing signal costs 2 ms


def mark(argv: "Sequence[str]") -> str:
    """Return SAFERUN_AGENT_PID for this process, an agent with the command line `argv`."""
    # An abbreviation may be as short as `--no-`. If a script's own option begins so, only the name
    # of the namespace is lost.
    no_python = any(word.startswith(("--no-", "--no_")) for word in argv)
    if no_python or "PET_NO_PYTHON" in os.environ or "PYTHON_EXEC" in os.environ:
        return str(os.getpid())
    return f"{os.getpid()} {proc.namespace('self', 'pid')}".rstrip()


def outlive_user_signals() -> None:
    """Make this agent ignore SIGUSR1 and SIGUSR2, which would end it.

    A sender that signals the whole job (Slurm, pkill) means the ranks. They get the default action
    back, since a handler, unlike an ignored signal, is not kept by exec. torchrun's own handlers,
    which it sets later for `--signals-to-handle`, replace these.
    """
    import _signal  # type: ignore[import-not-found]  # the base of signal, which takes 2 ms

    for number in (_signal.SIGUSR1, _signal.SIGUSR2):
        if _signal.getsignal(number) == _signal.SIG_DFL:
            _signal.signal(number, lambda number, frame: None)
            _signal.siginterrupt(number, False)


def started_this_process() -> bool:
    """Return whether this process is a child of its agent, or was started by no agent of saferun.

    Under --no-python a shell is the rank, and a Python that the shell runs is not.
    """
    agent = _agent()[0]
    return agent is None or agent == os.getppid()


def tie() -> None:
    """Let the kernel end this rank when its agent ends; end it now if the agent has ended."""
    agent, namespace = _agent()
    rank_mark = os.environ.get(contract.RANK_MARK)
    if agent is None or rank_mark not in (None, str(os.getpid())):
        return
    if os.getppid() == agent:
        from ..base import prctl  # loads the base of ctypes, which only a rank itself needs

        prctl.die_with_parent()
        gone = os.getppid() != agent
    else:
        gone = _is_orphan(agent, namespace)
    if gone:
        os.kill(os.getpid(), _SIGKILL)


def _agent() -> "tuple[int | None, str]":
    # The pid of the agent (None: not started by an agent of saferun) and its pid namespace ("":
    # unknown).
    pid, _, namespace = os.environ.get(contract.AGENT_MARK, "").partition(" ")
    return (int(pid) if pid.isdigit() else None), namespace


def _is_orphan(agent: int, namespace: str) -> bool:
    # Ranks lead their own sessions. In a container a pid from outside has no meaning.
    ours = namespace != "" and namespace == proc.namespace("self", "pid")
    if not ours or os.getsid(0) != os.getpid():
        return False
    try:
        os.kill(agent, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    fields = proc.stat(agent)
    return fields is not None and fields[0] in ("Z", "X")
