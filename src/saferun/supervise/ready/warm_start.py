"""Pure: whether a process that imported ahead may become an attempt's first process.

The keeper starts such a warm process (keeper/warm_agent.py) during the previous attempt, with the
likely command line and environment: a torchrun that imports torch, or a plain python job that
imports what the previous process imported. It may become the attempt's first process only if a
newly started process would not differ from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from saferun.inject import contract
from saferun.keeper import protocol
from saferun.model import LaunchPlan
from saferun.planning.torchrun import torchrun_args
from saferun.planning.torchrun.torchrun_install import Launcher

_HARMLESS_FLAGS = frozenset("bBEIOPRsSu")  # flags of Python without a value

# Only ranks and their children read these variables, or torchrun when it is called. Any other
# change requires a normal start. Read from torch 2.13: `import torch.distributed.run` with a traced
# getenv(3) and os.environ, torch/distributed/run.py, launcher/api.py and elastic/. The agent's
# import also reads some of the TORCHINDUCTOR_ and TORCHDYNAMO_ variables, into settings that an
# agent never uses.
_MAY_CHANGE = (
    *("SAFERUN_", "PET_", "NCCL_", "TORCH_NCCL_", "CUDA_", "TORCHINDUCTOR_", "TORCHDYNAMO_"),
    *("TRITON_", "GLOO_", "TF_", "XLA_"),
)
_MAY_CHANGE_EXACTLY = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("TORCH_COMPILE_DISABLE", "TORCH_USE_CUDA_DSA", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    *("TORCHELASTIC_ERROR_FILE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
)


class WarmStart(NamedTuple):
    """What a warm process is prepared for."""

    argv: tuple[str, ...]  # likely command line, the launcher's part first
    env: Mapping[str, str]  # the whole environment
    interpreter: str  # the Python in the launcher's first line, or the job's
    flags: str = ""  # the Python's flags, as letters
    ranks: str | None = None  # the file that lists the ranks' imports, if it forks its ranks
    sets_threads: bool = False  # torchrun will set OMP_NUM_THREADS to 1 for its ranks
    own_group: bool = True  # it gets its own process group: it is no plain python job


def offer(launcher: Launcher, argv: Sequence[str], env: Mapping[str, str]) -> WarmStart | None:
    """Return what to prepare for a command; None if a warm agent could not replace it.

    Args:
        launcher: the result of `torchrun_install.find_launcher`.
        argv: the attempt's command line, which begins with that of the launcher.
        env: the attempt's environment.
    """
    if launcher.interpreter is None or tuple(argv[: len(launcher.argv)]) != launcher.argv:
        return None
    is_path = len(launcher.argv) == 2  # a Python, and the path of torch's own module
    if is_path or not set(launcher.flags) <= _HARMLESS_FLAGS or _forks_ranks(argv, env):
        return None
    return WarmStart(tuple(argv), dict(env), launcher.interpreter, launcher.flags)


def offered(
    launcher: Launcher | None, plan: LaunchPlan, env: Mapping[str, str], ranks: str | None
) -> WarmStart | None:
    """Return what to prepare for an attempt; None if no warm process can replace its first one.

    Args:
        launcher: the result of `torchrun_install.find_launcher`; None for plain python.
        plan: the plan of the attempt.
        env: the attempt's whole environment.
        ranks: the file that lists the imports of the job's processes; None for `start.ranks:
            spawn`.
    """
    argv, options = plan.command, plan.options
    if options.no_python or (launcher is None and (ranks is None or options.code)):
        return None
    if launcher is None:
        return WarmStart(argv, env, argv[0], ranks=ranks, own_group=False)
    if ranks is not None and launcher.flags:  # torchrun starts ranks without these flags
        return None
    found = offer(launcher, argv, env)
    threads = torchrun_args.ranks(plan) > 1 and "OMP_NUM_THREADS" not in env
    return found and found._replace(ranks=ranks, sets_threads=threads)


def difference(prepared: WarmStart, argv: Sequence[str], env: Mapping[str, str]) -> str:
    """Return how the prepared process differs from a newly started one; "" if it does not.

    The launcher must be the same; its arguments are read later, when it is called. Variables that
    only ranks read may differ. Variables that Python, the dynamic loader or the agent's `import
    torch` may read, and unknown ones, must not. A plain python job may read all.

    Args:
        prepared: the command for which the agent was started.
        argv: the attempt's command line.
        env: the attempt's whole environment.
    """
    if _program(prepared.argv) != _program(argv):
        return "its command is another"
    names = sorted({*prepared.env, *env})
    changed = [name for name in names if prepared.env.get(name) != env.get(name)]
    if prepared.own_group:
        changed = [name for name in changed if name not in _MAY_CHANGE_EXACTLY]
    begin = _MAY_CHANGE if prepared.own_group else ("SAFERUN_",)
    other = next((name for name in changed if not name.startswith(begin)), "")
    return other and f"{other} has another value than when it was prepared"


def command(prepared: WarmStart, ignored: list[int]) -> protocol.Prepare:
    """Return the keeper's command that starts the agent; the job ignores the signals `ignored`."""
    # Its command line is not an agent's, so our sitecustomize would start the hooks: that must wait
    # until the hand-over.
    env = {name: value for name, value in prepared.env.items() if name != contract.VARIABLE}
    if prepared.ranks is not None and prepared.sets_threads:  # libraries read it at their import
        env.setdefault("OMP_NUM_THREADS", "1")
    python = [prepared.interpreter, *(["-" + prepared.flags] if prepared.flags else [])]
    program = "-m" if "-m" in _program(prepared.argv) else prepared.argv[0]
    program = program if prepared.own_group else ""
    return protocol.Prepare(
        python=python,
        env=env,
        program=program,
        argv=[*([] if program in ("", "-m") else python), *prepared.argv],
        ignored=ignored,
        ranks=prepared.ranks,
        own_group=prepared.own_group,
    )


def _program(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the launcher's part of a command line: its program, or a Python with torch's module.

    >>> _program(["/v/bin/python", "-P", "-m", "torch.distributed.run", "train.py"])
    ('/v/bin/python', '-P', '-m', 'torch.distributed.run')
    >>> _program(["/v/bin/torchrun", "-m", "train"])
    ('/v/bin/torchrun',)
    """
    for at in (1, 2):
        if list(argv[at : at + 2]) == ["-m", "torch.distributed.run"]:
            return tuple(argv[: at + 2])
    return tuple(argv[:1])


def _forks_ranks(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    # --run-path with --start-method fork: ranks are copies of the agent and read what it has read.
    if env.get("PET_START_METHOD", "").startswith("fork"):
        return True
    return re.search(r"\0--star[^\0=]*[\0=]fork", "\0".join(argv)) is not None
