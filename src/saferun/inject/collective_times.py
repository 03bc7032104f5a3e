"""Write the times of a rank's collectives to a file when `watch` sends a signal.

Target: torch's flight recorder (`torch._C._distributed_c10d._dump_nccl_trace`, `_dump_fr_trace`),
which is on by default from torch 2.11 on and records gloo's collectives from 2.9 on.
Reason: for each dump the recorder's own pipe prints an error line on stderr ("preparing to dump
debug info"), and looks up the lines of the script, which holds the GIL for long. It supports only
NCCL.
Delete when torch gives the times of a running job without these effects.

Until the signal comes it costs a rank nothing. Then the dump takes some 40 ms for 2000 entries, in
the main thread between two Python instructions. System calls continue (SA_RESTART), and Dynamo,
which may examine any frame of that thread, is told to skip this one.
"""

from __future__ import annotations

# The base of `signal`: a profiler (scalene) puts functions there that know signals by name only.
import _signal as signal  # type: ignore[import-not-found]
import os
import sys
import threading
from types import ModuleType
from typing import Any

from . import contract
from .context import Context

_ASK = (contract.TIMES_SIGNAL, contract.TIMING_SIGNAL)


def arm(c10d: ModuleType, context: Context) -> None:
    """Let this rank answer the signals, which is possible only in the main thread.

    Args:
        c10d: torch.distributed.distributed_c10d, whose group is initialised.
        context: the process's context.
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
        except FileExistsError:  # the previous answer was not read yet, and is enough
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
    """Report in a line that this rank answers no more; the watch checks who takes the signals.

    The job may be writing its own line, so that `sys.stderr` would raise.
    """
    for number in _ASK:
        signal.signal(number, signal.SIG_IGN)
    what = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    line = f"saferun: the watch for slow ranks gets no times from this rank ({what})\n"
    try:
        os.write(2, line.encode("utf-8", "replace"))
    except OSError:  # stderr has no reader
        pass


def _dump(dumps: list[Any]) -> bytes:
    """Return NCCL's record if it has an entry, else the other record; without stacks."""
    for dump in dumps[:-1]:
        content: bytes = dump(True, False, False)
        if b"nccl:" in content:
            return content
    last: bytes = dumps[-1](True, False, False)
    return last


def _time_collectives(c10d: Any) -> None:
    """Let NCCL groups measure their collectives, unless kernels must start in a fixed order.

    In that case, measuring would keep the kernels from overlapping:
    https://github.com/pytorch/pytorch/issues/143890
    """
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return
    for group in list(c10d._world.pg_map):
        try:
            group._enable_collectives_timing()
        except RuntimeError:  # gloo cannot do this
            pass


def _hide_from_dynamo(frames: Any, code: object) -> None:
    """Make Dynamo run a function uncompiled, with everything that it calls."""
    if hasattr(frames, "skip_code"):  # absent before torch 2.7
        frames.skip_code(code)
    else:
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
