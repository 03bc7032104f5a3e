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

_AGENT_MODULES = ("torch.distributed.run", "torch.distributed.launch")
_AGENT_FILES = ("torchrun", "torch/distributed/run.py", "torch/distributed/launch.py")
_HELPER_CODE = ("from multiprocessing.resource_tracker ", "from multiprocessing.forkserver ")
_ATTEMPT = "SAFERUN_ATTEMPT"  # set only if saferun stays beside the job
_WORKER = "SAFERUN_WORKER"  # set only with plain python, for which a scheduler may export RANK
_COMPILE_WORKER = "torch._inductor.compile_worker"

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
        _start_agent(argv)
    if kind != "job":
        return
    if has_rank and agent.started_this_process():
        os.environ.setdefault(contract.RANK_MARK, str(os.getpid()))
    if not has_rank or (_WORKER in os.environ and contract.RANK_MARK not in os.environ):
        contract.mark_main(_text, os.environ, os.getpid())
    finder.install(_text)


def settle() -> None:
    """Do the work that must follow the user's own sitecustomize.

    Modules that were imported before are hooked. In processes that the launcher started, a crash
    will write its Python stack. A rank also writes its first receipt and takes sys.excepthook,
    which Ubuntu's sitecustomize replaces without calling the previous one.
    """
    _settle_rank()
    if any(name in sys.modules for name in TARGETS):
        _hook_late_imports()


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


def _start_agent(argv: "Sequence[str]") -> None:
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

        node_agent.start()
    atexit.register(gc.freeze)


def _original_argv() -> "list[str]":
    if hasattr(sys, "orig_argv"):
        return sys.orig_argv
    from ..base import proc  # Python 3.9 alone needs it

    return proc.command("self")


def kind_of(argv: "Sequence[str]") -> str:
    """Return "agent", "helper" or "job" for a Python's command line."""
    option, value = _program(argv)
    if option == "-m":
        if value in _AGENT_MODULES:
            return "agent"
        return "helper" if value.startswith(_COMPILE_WORKER) else "job"
    if option == "-c":
        return "helper" if value.startswith(_HELPER_CODE) else "job"
    if value in _AGENT_FILES or value.endswith(tuple("/" + file for file in _AGENT_FILES)):
        return "agent"
    return "helper" if _COMPILE_WORKER.replace(".", "/") + "/" in value else "job"


def _program(argv: "Sequence[str]") -> "tuple[str, str]":
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
