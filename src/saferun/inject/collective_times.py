"""Write the times of a rank's collectives to a file when `watch` asks for them by a signal.

Target: torch's flight recorder (`torch._C._distributed_c10d._dump_nccl_trace`, `_dump_fr_trace`),
which is on by default from torch 2.11 on and has gloo's collectives from 2.9 on.
Reason: the recorder's own pipe prints an error's line on stderr for each dump ("preparing to dump
debug info"), looks up the lines of the script, which holds the GIL for long, and knows NCCL alone.
Delete when torch gives the times of a running job without that.

A signal costs a rank nothing until it comes, and then the dump, some 40 ms for 2000 entries, in the
main thread between two instructions of Python. System calls go on (SA_RESTART), and Dynamo, which
may look at any frame of that thread, is told to leave this one alone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import ModuleType
from typing import Any

from . import contract
from .context import Context

_ASK = (contract.TIMES_SIGNAL, contract.TIMING_SIGNAL)


def arm(c10d: ModuleType, context: Context) -> None:
    """Have this rank answer the signals, if it can: in the main thread alone.

    Args:
        c10d: torch.distributed.distributed_c10d, whose group is initialised.
        context: the process's.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    try:
        _arm(c10d, context)
    except Exception as error:
        _give_up(error)


def _arm(c10d: ModuleType, context: Context) -> None:
    torch: Any = sys.modules["torch"]
    bindings, frames = torch._C._distributed_c10d, torch._C._dynamo.eval_frame
    names = ("_dump_nccl_trace", "_dump_fr_trace")
    dumps = [found for name in names if (found := getattr(bindings, name, None))]
    if not dumps or any(signal.getsignal(number) is not signal.SIG_DFL for number in _ASK):
        return
    pid = os.getpid()

    def answer(number: int, frame: object) -> None:
        dynamo = frames.set_eval_frame(None)
        try:
            capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
            if os.getpid() == pid and not capturing:
                if number == contract.TIMING_SIGNAL:
                    _time_collectives(c10d)
                context.write_file(contract.TIMES, _dump(dumps))
        except FileExistsError:  # the answer before this one has not been read: it will do
            pass
        except Exception as error:
            _give_up(error)
        finally:
            frames.set_eval_frame(dynamo)

    _hide_from_dynamo(frames, answer.__code__)
    for number in _ASK:
        signal.signal(number, answer)
        signal.siginterrupt(number, False)


def _give_up(error: Exception) -> None:
    """Say in one line that this rank answers no more; the watch asks who takes the signals.

    The job may be in the middle of a line of its own: `sys.stderr` would raise.
    """
    for number in _ASK:
        signal.signal(number, signal.SIG_IGN)
    what = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    line = f"saferun: the watch for slow ranks gets no times from this rank ({what})\n"
    try:
        os.write(2, line.encode("utf-8", "replace"))
    except OSError:  # nobody reads it
        pass


def _dump(dumps: list[Any]) -> bytes:
    """Return NCCL's record where it has an entry, else the other one's, without stacks."""
    for dump in dumps[:-1]:
        content: bytes = dump(True, False, False)
        if b"nccl:" in content:
            return content
    last: bytes = dumps[-1](True, False, False)
    return last


def _time_collectives(c10d: Any) -> None:
    """Have groups of NCCL time their collectives, unless kernels have to start in their order.

    Then timing keeps them from overlapping: https://github.com/pytorch/pytorch/issues/143890
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return
    for group in list(c10d._world.pg_map):
        try:
            group._enable_collectives_timing()
        except RuntimeError:  # gloo cannot
            pass


def _hide_from_dynamo(frames: Any, code: object) -> None:
    """Have Dynamo run a function as it is; it compiles nothing that the function calls, either."""
    if hasattr(frames, "skip_code"):  # before torch 2.7
        frames.skip_code(code)
    else:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
