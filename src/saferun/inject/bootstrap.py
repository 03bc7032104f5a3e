"""Prepare this Python: watch for the modules that hooks need, and act right after their import.

That costs only a wrapper in importlib (no json, no re, no torch); SAFERUN_INJECT is parsed when a
watched module is imported. torchrun's agent, multiprocessing's resource tracker and fork server,
and inductor's compile workers are left alone. Children of `multiprocessing.spawn` are prepared,
since `torch.multiprocessing.spawn` makes ranks of them.

A process that torchrun's agent started as a rank writes one receipt at its start, and the kernel
ends it when the agent ends.
"""

import os
import sys

from . import contract, finder
from .targets import TARGETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

_AGENT_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_AGENT_FILES = ("torchrun", "torch/distributed/run.py", "torch/distributed/launch.py")
_HELPER_CODE = ("from multiprocessing.resource_tracker ", "from multiprocessing.forkserver ")
_ATTEMPT = "SAFERUN_ATTEMPT"  # set only if saferun stays beside the job
_WORKER = "SAFERUN_WORKER"  # set only with plain python, for which a scheduler may export RANK
_COMPILE_WORKER = "torch._inductor.compile_worker"

_AGENT_API = "torch.distributed.elastic.agent.server.api"
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")

_text = ""  # SAFERUN_INJECT at the start


def start() -> None:
    """Prepare this process, unless it can never be a rank."""
    global _text
    _text = os.environ.get(contract.VARIABLE, "")
    has_rank = "RANK" in os.environ
    if has_rank:
        from . import agent

        agent.tie()
    argv = _original_argv()
    kind = kind_of(argv)
    if kind == "agent":
        start_agent(argv)
    if kind != "job":
        return
    if has_rank and agent.started_this_process():
        os.environ.setdefault(contract.RANK_MARK, str(os.getpid()))
    if not has_rank or (_WORKER in os.environ and contract.RANK_MARK not in os.environ):
        contract.mark_main(_text, os.environ, os.getpid())
    finder.install(_text)


def settle() -> None:
    """Do the work that must follow the user's own sitecustomize.

    That one may have put itself first in PYTHONPATH and may load no other, as OpenTelemetry's does
    (https://github.com/open-telemetry/opentelemetry-python-contrib/pull/4469); the ranks need us
    first. Modules that were imported before are hooked. In processes that the launcher started, a
    crash will write its Python stack. A rank also writes its first receipt and takes
    sys.excepthook, which Ubuntu's sitecustomize replaces without calling the previous one.
    """
    come_first()
    _settle_rank()
    if any(name in sys.modules for name in TARGETS):
        _hook_late_imports()


def come_first() -> None:
    """Put our directory first in PYTHONPATH again, before what else stands there."""
    given = os.environ.get("PYTHONPATH", "")
    ordered = _ordered(given)
    if given != ordered:
        os.environ["PYTHONPATH"] = ordered


def _ordered(given: str) -> str:
    if given == _SITE or given.startswith(_SITE + os.pathsep):
        return given
    others = [entry for entry in given.split(os.pathsep) if entry != _SITE] if given else []
    return os.pathsep.join([_SITE, *others])


def _come_first_after_exec() -> None:
    """Let a rank's program that this Python is replaced by load us first, too.

    `torchrun --no-python … opentelemetry-instrument python train.py` puts OpenTelemetry's directory
    first in PYTHONPATH and executes python.
    """
    execv, execve = os.execv, os.execve

    def execv_with_hooks(path: "Any", argv: "Any") -> "NoReturn":
        if contract.VARIABLE in os.environ:
            come_first()
        execv(path, argv)

    def execve_with_hooks(path: "Any", argv: "Any", env: "Any") -> "NoReturn":
        if isinstance(env, dict) and env.get(contract.VARIABLE):
            env = {**env, "PYTHONPATH": _ordered(env.get("PYTHONPATH", ""))}
        execve(path, argv, env)

    os.execv, os.execve = execv_with_hooks, execve_with_hooks


def _settle_rank() -> None:
    if "RANK" not in os.environ and contract.MAIN_MARK not in os.environ:
        return
    from . import rank

    if not rank.is_started_by_launcher():
        return
    from .hooks import excepthook

    excepthook.write_stack_of_crash(_text)
    if contract.lists_imports(_text):
        from . import imported_modules

        imported_modules.born = dict(os.environ)
    if rank.is_rank_process() or contract.START in os.environ:
        from . import receipts

        receipts.write_bootstrap(_text, contract.APPLIED)
    if not rank.is_rank_process():
        return
    _come_first_after_exec()
    import atexit

    atexit.register(_write_last_states)
    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        excepthook.watch(_text)


def _hook_late_imports() -> None:
    from . import hook_runner

    found = hook_runner.current(_text)
    if found is not None:
        found.hook_late_imports()


def _write_last_states() -> None:
    """Write to the receipt which watched modules this rank loaded without the finder."""
    if any(name in sys.modules for name in TARGETS):
        try:
            from . import hook_runner
        except ImportError:  # our files are gone, as the loader has said; no traceback at the end
            return
        found = hook_runner.current(_text)
        if found is not None:
            hook_runner.at_exit(found)


def start_agent(argv: "Sequence[str]") -> None:
    """Name this agent to its ranks, and skip the garbage collection at its end.

    Over all objects that `import torch` made, that collection takes 0.25 s and more, which is most
    of the agent's exit, and the next attempt waits for it.
    """
    import atexit
    import gc

    from . import agent

    # The agent's workers are ranks themselves, even if a rank has started the agent.
    os.environ.pop(contract.RANK_MARK, None)
    os.environ[contract.AGENT_MARK] = agent.mark(argv)
    if _ATTEMPT in os.environ:  # otherwise saferun is not beside torchrun (`--retries 0`)
        agent.outlive_user_signals()
    if "SAFERUN_NODES" in os.environ:
        from .node import node_agent

        node_agent.start(come_first)
    else:
        _come_first_later()
    atexit.register(gc.freeze)


def _come_first_later() -> None:
    """Come first again before ranks are started, where a usercustomize may act after us."""
    if _AGENT_API in sys.modules:  # a warm agent
        come_first()
    elif getattr(sys.modules.get("site"), "ENABLE_USER_SITE", False) and any(
        os.path.isfile(os.path.join(entry, "usercustomize.py")) for entry in sys.path
    ):
        finder.watch((_AGENT_API,), lambda name, module: come_first())


def _original_argv() -> "list[str]":
    if hasattr(sys, "orig_argv"):
        return sys.orig_argv
    from ..base import proc  # Python 3.9 alone needs it

    return proc.command("self")


def kind_of(argv: "Sequence[str]") -> str:
    """Return "agent", "helper" or "job" for a Python's command line."""
    option, value = program(argv)
    if option == "-m":
        if value in _AGENT_MODULES:
            return "agent"
        return "helper" if value.startswith(_COMPILE_WORKER) else "job"
    if option == "-c":
        return "helper" if value.startswith(_HELPER_CODE) else "job"
    if value in _AGENT_FILES or value.endswith(tuple("/" + file for file in _AGENT_FILES)):
        return "agent"
    return "helper" if _COMPILE_WORKER.replace(".", "/") + "/" in value else "job"


def program(argv: "Sequence[str]") -> "tuple[str, str]":
    """Return ("-m", module), ("-c", code) or ("", script) for a Python command line."""
    arguments = iter(argv[1:])
    for word in arguments:
        if word in ("-", "--") or not word.startswith("-"):
            return "", word
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(arguments, "")
            continue
        for place, letter in enumerate(word[1:], 2):
            if letter in "mcWX":  # takes a value: the rest of the word, or the next word
                value = word[place:] or next(arguments, "")
                if letter in "mc":
                    return "-" + letter, value
                break
    return "", ""
