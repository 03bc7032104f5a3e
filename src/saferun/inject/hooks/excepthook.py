"""Write a rank's first uncaught exception to torch elastic's error file, even without @record.

Target: `sys.excepthook` (and `sys.last_value` at exit, for scripts that replace it), in the process
that the launcher started as a rank, before its first line; `faulthandler` in that process, in a
plain python job, in ranks that multiprocessing starts, and again in DataLoader workers, in which
torch installs handlers without a Python stack.
Reason: without `@record` torchrun only knows exit codes and cannot tell the first failure from its
consequences (https://docs.pytorch.org/docs/stable/elastic/errors.html). The format is the one that
torch/distributed/elastic/multiprocessing/errors reads, unchanged from torch 1.9 to 2.13.
Delete when torchrun records exceptions without a decorator.

Not covered: a script that replaces `sys.excepthook` by a function that calls `os._exit`.
"""

import os
import sys

from .. import contract, cut, rank
from ..hidden_frames import hide_all, replace, without_ours

TYPE_CHECKING = False
if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from types import ModuleType, TracebackType

    from ..context import Context

    ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_BASES = 9  # classes that an exception's own derives from, at most one fewer
_TRACEBACK_CHARS = 4000  # characters kept from the end of a thread's traceback
_WORKERS = "torch.utils.data._utils.signal_handling"
_watcher: "Watcher | None" = None
_is_ours = False  # we enabled faulthandler, not the script


class Watcher:
    """Run before the previous excepthook, and record for one process only."""

    def __init__(self, text: str, previous: "ExceptHook") -> None:
        """Store SAFERUN_INJECT's text and the excepthook to call afterwards."""
        self._text = text
        self._previous = previous
        self._pid = os.getpid()
        self._done = False

    def hook(
        self, kind: "type[BaseException]", value: BaseException, trace: "TracebackType | None"
    ) -> None:
        """Record the exception, then call the previous hook.

        Args:
            kind: the class, as for sys.excepthook.
            value: the exception.
            trace: the exception's traceback.
        """
        try:
            hide_all(value)
            trace = without_ours(trace)
        except Exception:  # a user's exception whose attributes raise
            pass
        self.record(value, trace)
        self._previous(kind, value, trace)

    def at_exit(self) -> None:
        """Record the exception that the interpreter printed last: the hook may be replaced.

        If there is none, write the rank's last receipt: if the process is killed later, its work is
        done.
        """
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if value is not None:
            self.record(value, value.__traceback__)
        elif not self._done and os.getpid() == self._pid:
            from .. import receipts

            receipts.write_bootstrap(self._text, contract.FINISHED)

    def record(self, value: BaseException, trace: "TracebackType | None") -> None:
        """Write the error file once, only in the rank process itself. Never raises."""
        if self._done or os.getpid() != self._pid:
            return
        self._done = True
        if isinstance(value, (SystemExit, KeyboardInterrupt)):
            return
        try:
            from .. import context

            try:
                _write(self._text, value, trace)
            except Exception as error:
                context.say(f"inject: {_VARIABLE}: {error}")
        except Exception:  # our files are gone; the previous hook must still run
            pass


def watch(text: str) -> None:
    """Install our `sys.excepthook` before the present one. A second call does nothing.

    Args:
        text: the value of SAFERUN_INJECT.
    """
    global _watcher
    if _watcher is None:
        import atexit

        _watcher = Watcher(text, sys.excepthook)
        sys.excepthook = _watcher.hook
        atexit.register(_watcher.at_exit)


def apply(name: str, module: "ModuleType", context: "Context") -> None:
    """Enable `faulthandler` in a rank, unless it is enabled, and report what is in place.

    Args:
        name: "torch", or the name of torch's module for the signals of DataLoader workers.
        module: that module.
        context: the process's context.
    """
    if name == _WORKERS:
        if context.hooks.excepthook == "on" and _is_of_job():
            _keep_stacks_of_workers(module)
        return
    if context.hooks.excepthook == "off":
        context.receipt("excepthook", contract.OFF)
        return
    if not _is_of_job():
        context.receipt("excepthook", contract.NOT_NEEDED, why="not started by the launcher")
        return
    _watch_threads(context)
    outcome = contract.APPLIED if _watcher is not None else contract.NOT_NEEDED
    stacks = _write_stacks_on_signal(context) if context.is_watched else "the watch is off"
    context.receipt("excepthook", outcome, faulthandler=_switch_faulthandler_on(), stacks=stacks)


def write_stack_of_crash(text: str) -> None:
    """Make a crash write its Python stack, from before the script's first line on.

    Args:
        text: the value of SAFERUN_INJECT.
    """
    if not contract.is_off(text, "excepthook"):
        _switch_faulthandler_on()


def _is_of_job() -> bool:
    """Return whether the launcher or `multiprocessing.spawn` started this process."""
    spawned = "--multiprocessing-fork" in getattr(sys, "orig_argv", ())  # since Python 3.10
    return spawned or rank.is_started_by_launcher()


def _watch_threads(context: "Context") -> None:
    """Write an exception that ends a thread to the receipt; the rank itself continues."""
    import threading

    previous = threading.excepthook
    if getattr(previous, "_saferun_previous", None) is not None:  # torch was reloaded
        return

    def excepthook(args: "threading.ExceptHookArgs", /) -> object:
        try:
            if args.exc_value is not None and args.exc_type is not SystemExit:
                hide_all(args.exc_value)
                _note_thread(context, args.exc_value, getattr(args.thread, "name", ""))
        except Exception:  # the thread's exception is printed in any case
            pass
        return previous(args)

    excepthook._saferun_previous = previous  # type: ignore[attr-defined]  # the mark
    threading.excepthook = excepthook


def _note_thread(context: "Context", value: BaseException, thread: str) -> None:
    import traceback

    text = "".join(traceback.format_exception(type(value), value, value.__traceback__))
    facts = {"error": _message(value), "traceback": cut.end(text, _TRACEBACK_CHARS)}
    context.receipt("excepthook", contract.OBSERVED, thread=thread, **facts)


def _message(value: BaseException) -> str:
    """Return an exception as one line; for a group also its first exception that is no group."""
    try:
        text = str(value)
    except Exception:
        text = "<exception str() failed>"
    text = f"{type(value).__name__}: {text}"
    inside = getattr(value, "exceptions", None)  # an exception group has them
    first = inside[0] if isinstance(inside, tuple) and inside else None
    return f"{text}: {_message(first)}" if isinstance(first, BaseException) else text


def _switch_faulthandler_on() -> str:
    import faulthandler

    global _is_ours
    if faulthandler.is_enabled():
        return "switched on" if _is_ours else "already on"
    # Use the process's own stderr: scripts replace it by objects without a descriptor.
    try:
        faulthandler.enable(file=sys.__stderr__)  # type: ignore[arg-type]  # None is caught
    except (AttributeError, OSError, RuntimeError, ValueError):  # it is closed
        return "no stderr"
    _is_ours = True
    return "switched on"


def _keep_stacks_of_workers(module: "ModuleType") -> None:
    """Make faulthandler write the Python stack before torch's handlers end a DataLoader worker."""
    import faulthandler

    if not hasattr(module, "_set_worker_signal_handlers"):
        return

    @replace(module, "_set_worker_signal_handlers")
    def set_handlers(original: "Callable[..., object]", *args: object) -> None:
        if _is_ours:
            faulthandler.disable()  # otherwise its overwritten handlers count as installed
        original(*args)
        _switch_faulthandler_on()


def _write_stacks_on_signal(context: "Context") -> str:
    """Make faulthandler write all threads' stacks to a file when `watch` sends a signal.

    The handler is written in C, so it needs no thread and works while no Python code runs. The file
    stays open for it.
    """
    import faulthandler
    import signal

    try:
        if signal.getsignal(contract.STACKS_SIGNAL) is not signal.SIG_DFL:
            return "the script uses the signal"
        file = context.open_file(contract.STACKS)
        if file is None:
            return "no directory"
        faulthandler.register(contract.STACKS_SIGNAL, file=file, all_threads=True)
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        return f"not armed: {error}"
    return "armed"


def _context_error(value: BaseException) -> str:
    """Return the CUDA context's error after an error of the GPU; "" if the context works."""
    from . import cuda_failures

    if not cuda_failures.is_of_gpu(value):
        return ""
    return cuda_failures.probe_at_once().partition("\n")[0]


def _error_file(value: BaseException, trace: "TracebackType | None", context_error: str) -> bytes:
    import json
    import time
    import traceback

    now = time.time()
    extra = {
        "py_callstack": "".join(traceback.format_exception(type(value), value, trace)),
        "timestamp": str(int(now)),  # torch reads it with int()
        "type": type(value).__name__,  # ours, as what follows is
        "bases": [base.__name__ for base in type(value).__mro__[1:_BASES]],
        "time_s": now,  # orders ranks that fail within one second
        **({"cuda_context": context_error} if context_error else {}),
    }
    message = {"message": _message(value), "extraInfo": extra}
    return json.dumps({"message": message}).encode()


def _write(text: str, value: BaseException, trace: "TracebackType | None") -> None:
    """Write the error file for torchrun, and a copy for saferun.

    Once a rank has failed, torchrun ends the others with SIGTERM, perhaps during this write. A
    truncated error file makes torchrun itself fail, so the file appears whole or not at all.
    """
    from ...base import files
    from .. import hook_runner

    path = os.environ.get(_VARIABLE)
    current = hook_runner.current(text) if path else None
    if not path or current is None or current.hooks.excepthook == "off":
        return
    context_error = _context_error(value)
    if context_error:
        current.receipt("excepthook", contract.OBSERVED, cuda_context=context_error)
    content = _error_file(value, trace, context_error)
    try:
        files.write_new(path, content)
    except FileExistsError:
        pass  # @record wrote it before, for the same exception
    try:
        current.write_file(".error.json", content)
    except OSError:
        pass  # the journal's disk is full or gone: torchrun's file has the same content
