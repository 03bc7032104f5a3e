"""Write a rank's first uncaught exception where torch elastic looks for it, even without @record.

Target: `sys.excepthook` (and `sys.last_value` at exit, for scripts that replace it), in the process
that the launcher started as a rank, from before its first line; `faulthandler` once torch is there.
Reason: without `@record` torchrun only knows exit codes and cannot tell root from echo
(https://docs.pytorch.org/docs/stable/elastic/errors.html). The format is the one that
torch/distributed/elastic/multiprocessing/errors reads, unchanged from torch 1.9 to 2.13.
Delete when torchrun records exceptions without a decorator.

Not covered: a script that replaces `sys.excepthook` by one that calls `os._exit`.
"""

import os
import sys

from _saferun_inject import bootstrap, contract

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
_watcher = None


class Watcher:
    """Stands before the excepthook that was there and records for one process only."""

    def __init__(self, previous):
        self._previous = previous
        self._pid = os.getpid()
        self._done = False

    def hook(self, kind, value, trace):
        """Record, then do what would have been done without us."""
        self.record(value, trace)
        self._previous(kind, value, trace)

    def at_exit(self):
        """Look at what the interpreter printed last: the hook may have been replaced.

        No exception: what kills this process from here on kills one that has done its work.
        """
        value = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if value is not None:
            self.record(value, value.__traceback__)
        elif not self._done and os.getpid() == self._pid:
            bootstrap.leave_word(contract.FINISHED)

    def record(self, value, trace):
        """Write the error file, once, in the rank process itself. Never raises."""
        if self._done or os.getpid() != self._pid:
            return
        self._done = True
        try:
            path = os.environ.get(_VARIABLE)
            if path and not isinstance(value, (SystemExit, KeyboardInterrupt)) and _is_on():
                _write(path, _report(value, trace))
        except Exception as error:
            bootstrap.say("inject: {}: {}".format(_VARIABLE, error))


def watch():
    """Take `sys.excepthook`, keeping the one that is there. Twice equals once."""
    global _watcher
    if _watcher is None:
        import atexit

        _watcher = Watcher(sys.excepthook)
        sys.excepthook = _watcher.hook
        atexit.register(_watcher.at_exit)


def apply(name, module, context):
    """Switch `faulthandler` on in a rank, unless it is, and say what is in place."""
    if _setting(context) == "off":
        context.receipt("excepthook", contract.OFF)
        return
    if not bootstrap.is_rank_process():
        context.receipt("excepthook", contract.NOT_NEEDED, why="not started as a rank")
        return
    import faulthandler

    state = "already on" if faulthandler.is_enabled() else _switch_on(faulthandler)
    outcome = contract.APPLIED if _watcher is not None else contract.NOT_NEEDED
    context.receipt("excepthook", outcome, faulthandler=state)


def _switch_on(faulthandler):
    """Enable it on the process's own stderr: scripts put objects without a descriptor there."""
    try:
        faulthandler.enable(file=sys.__stderr__)
    except (AttributeError, OSError, RuntimeError, ValueError):  # closed: nobody to tell
        return "no stderr"
    return "switched on"


def _is_on():
    context = bootstrap.current_context()
    return context is not None and _setting(context) != "off"


def _setting(context):
    chosen = context.hooks.get("excepthook", "on")
    return "off" if chosen in (False, "off") else "on"


def _report(value, trace):
    import json
    import time
    import traceback

    try:
        text = str(value)
    except Exception:
        text = "<exception str() failed>"
    now = time.time()
    extra = {
        "py_callstack": "".join(traceback.format_exception(type(value), value, trace)),
        "timestamp": str(int(now)),  # torch reads it with int()
        "time_s": now,  # ours: orders ranks that fail within one second
    }
    message = {"message": "{}: {}".format(type(value).__name__, text), "extraInfo": extra}
    return json.dumps({"message": message}).encode()


def _write(path, content):
    """Write the report where torchrun looks for it, and where saferun does.

    torchrun ends the other ranks with SIGTERM once one has failed, in the middle of this perhaps,
    and an error file that is cut breaks torchrun itself: it appears whole, or not.
    """
    try:
        bootstrap.write_new(path, content)
    except FileExistsError:
        pass  # @record was there first, and knows the same exception
    try:
        bootstrap.current_context().leave(".error.json", content)
    except OSError:
        pass  # the journal's directory is full or gone: torchrun's file tells the same
