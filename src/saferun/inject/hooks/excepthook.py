"""Write a rank's first uncaught exception where torch elastic looks for it, even without @record.

Target: `sys.excepthook` (and `sys.last_value` at exit, for scripts that replace it), in the process
that the launcher started as a rank, from before its first line; `faulthandler` there and under
plain python, in ranks that multiprocessing starts, and again in DataLoader workers, where torch
puts handlers without a Python stack in its place.
Reason: without `@record` torchrun only knows exit codes and cannot tell the first failure from
those that it causes (https://docs.pytorch.org/docs/stable/elastic/errors.html). The format is the
one that torch/distributed/elastic/multiprocessing/errors reads, unchanged from torch 1.9 to 2.13.
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

    ExceptHook = Callable[
        [type[BaseException], BaseException, TracebackType | None],
        object,
    ]

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_TRACEBACK_CHARS = 4000  # the receipt has so much of the end of a thread's traceback
_WORKERS = "torch.utils.data._utils.signal_handling"
_watcher: "Watcher | None" = None
_is_ours = False  # we switched faulthandler on, the script did not


class Watcher:
    """Runs before the excepthook that was there, and records for one process only."""

    def __init__(self, text: str, previous: "ExceptHook") -> None:
        """Take SAFERUN_INJECT's text and the excepthook to call afterwards."""
        self._text = text
        self._previous = previous
        self._pid = os.getpid()
        self._done = False

    def hook(
        self,
        kind: "type[BaseException]",
        value: BaseException,
        trace: "TracebackType | None",
    ) -> None:
        """Record the exception, then call the previous hook.

        Args:
            kind: as sys.excepthook gets it, like the others.
            value: the exception.
            trace: where it came from.
        """
        try:
            hide_all(value)
            trace = without_ours(trace)
        except Exception:  # an exception of the user's own whose attributes raise
            pass
        self.record(value, trace)
        self._previous(kind, value, trace)

    def at_exit(self) -> None:
        """Record what the interpreter printed last: the hook may have been replaced.

        Where it printed no exception, write the rank's last receipt: what kills this process from
        here on kills one that has done its work.
        """
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if value is not None:
            self.record(value, value.__traceback__)
        elif not self._done and os.getpid() == self._pid:
            from .. import receipts

            receipts.write_bootstrap(self._text, contract.FINISHED)

    def record(self, value: BaseException, trace: "TracebackType | None") -> None:
        """Write the error file, once, in the rank process itself. Never raises."""
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
        except Exception:  # our files are gone: the previous hook must run all the same
            pass


def watch(text: str) -> None:
    """Take `sys.excepthook`, keeping the one that is there. A second call does nothing.

    Args:
        text: SAFERUN_INJECT.
    """
    global _watcher
    if _watcher is None:
        import atexit

        _watcher = Watcher(text, sys.excepthook)
        sys.excepthook = _watcher.hook
        atexit.register(_watcher.at_exit)


def apply(name: str, module: "ModuleType", context: "Context") -> None:
    """Switch `faulthandler` on in a rank, unless it is on, and report what is in place.

    Args:
        name: "torch", or that of torch's module for the signals of DataLoader workers.
        module: that module.
        context: the process's.
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
    """Have a crash write its Python stack, from before the script's first line.

    Args:
        text: SAFERUN_INJECT.
    """
    if not contract.is_off(text, "excepthook"):
        _switch_faulthandler_on()


def _is_of_job() -> bool:
    """Tell whether the launcher started this process, or `multiprocessing.spawn` did."""
    spawned = "--multiprocessing-fork" in getattr(sys, "orig_argv", ())  # Python 3.10 on
    return spawned or rank.is_started_by_launcher()


def _watch_threads(context: "Context") -> None:
    """Put the exception that ends a thread into the receipt: the rank itself goes on."""
    import threading

    previous = threading.excepthook
    if getattr(previous, "_saferun_previous", None) is not None:  # torch was reloaded
        return

    def excepthook(args: "threading.ExceptHookArgs", /) -> object:
        try:
            if args.exc_value is not None and args.exc_type is not SystemExit:
                hide_all(args.exc_value)
                _note_thread(context, args.exc_value, getattr(args.thread, "name", ""))
        except Exception:  # what the thread raised is printed all the same
            pass
        return previous(args)

    excepthook._saferun_previous = previous  # type: ignore[attr-defined]  # the mark
    threading.excepthook = excepthook


def _note_thread(context: "Context", value: BaseException, thread: str) -> None:
    import traceback

    text = "".join(traceback.format_exception(type(value), value, value.__traceback__))
    facts = {
        "thread": thread,
        "error": _message(value),
        "traceback": cut.end(text, _TRACEBACK_CHARS),
    }
    context.receipt("excepthook", contract.OBSERVED, **facts)


def _message(value: BaseException) -> str:
    """Return an exception as one line; of a group also the first one that is no group."""
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
    # On the process's own stderr: scripts put objects without a descriptor in its place.
    try:
        faulthandler.enable(file=sys.__stderr__)  # type: ignore[arg-type]  # None is caught
    except (AttributeError, OSError, RuntimeError, ValueError):  # it is closed
        return "no stderr"
    _is_ours = True
    return "switched on"


def _keep_stacks_of_workers(module: "ModuleType") -> None:
    """Have faulthandler write the Python stack before torch's handlers end a DataLoader worker."""
    import faulthandler

    if not hasattr(module, "_set_worker_signal_handlers"):
        return

    @replace(module, "_set_worker_signal_handlers")
    def set_handlers(original: "Callable[..., object]", *args: object) -> None:
        if _is_ours:
            faulthandler.disable()  # else its handlers, which are overwritten now, count as there
        original(*args)
        _switch_faulthandler_on()


def _write_stacks_on_signal(context: "Context") -> str:
    """Have faulthandler write the stacks of all threads to a file when `watch` asks by a signal.

    It needs no thread, and works while Python code does not run: the handler is written in C. The
    file stays open for it.
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
    """Return what the CUDA context says after an error of the GPU's; "" where it works."""
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
        "time_s": now,  # orders ranks that fail within one second
        **({"cuda_context": context_error} if context_error else {}),
    }
    message = {"message": _message(value), "extraInfo": extra}
    return json.dumps({"message": message}).encode()


def _write(text: str, value: BaseException, trace: "TracebackType | None") -> None:
    """Write the error file where torchrun looks for it, and where saferun does.

    torchrun ends the other ranks with SIGTERM once one has failed, perhaps in the middle of this,
    and a truncated error file makes torchrun itself fail: the file appears whole or not at all.
    """
    from .. import hook_runner, receipts

    path = os.environ.get(_VARIABLE)
    current = hook_runner.current(text) if path else None
    if not path or current is None or current.hooks.excepthook == "off":
        return
    context_error = _context_error(value)
    if context_error:
        current.receipt("excepthook", contract.OBSERVED, cuda_context=context_error)
    content = _error_file(value, trace, context_error)
    try:
        receipts.write_new(path, content)
    except FileExistsError:
        pass  # @record wrote it first, for the same exception
    try:
        current.write_file(".error.json", content)
    except OSError:
        pass  # the journal's directory is full or gone: torchrun's file has the same content
