"""The program of a warm agent: import torch, wait for a task, and become the launcher.

Loaded from its place in the launcher's own Python, which may have no saferun: the standard library,
Python >= 3.9. keeper/warm_agent.py is the keeper's side of it.
"""

from __future__ import annotations

import marshal
import os
import sys
import time

from . import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Task = tuple[list[str], list[str], dict[str, str], dict[str, str]]  # see `_take_over`

_MODULE = "torch.distributed.run"


def wait(
    program: str, control: int, answer: int, files: Sequence[int], ranks: str | None
) -> Callable[[], object]:
    """Import what the launcher imports, wait for a task, and become the launcher.

    Args:
        program: the launcher's program, or "-m" for `-m torch.distributed.run`.
        control: descriptor that the task is read from, and then one byte to go on.
        answer: descriptor that one byte is written to when the task has been taken over.
        files: what becomes descriptors 1 and 2.
        ranks: the file that lists what ranks import, "" for none, if ranks are to be forked.

    Returns:
        What executes the launcher; in a process that was forked as a rank, what executes that.
    """
    began, at_start = time.monotonic(), frozenset(sys.modules)
    ours = (control, answer, *files)
    for fd in ours:
        os.set_inheritable(fd, False)
    process.set_name(process.WAITS)
    module = program == "-m"
    first_path = os.getcwd() if module else os.path.dirname(os.path.realpath(program))
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, first_path)
    origin, why = None, ""
    if ranks is None:
        __import__(_MODULE)
    else:
        from . import blank_ranks

        inherited = [fd for fd in _descriptors() if fd > 2]
        why, read = _import_as_rank()
        if not why:
            origin, why, act = blank_ranks.make(
                _lines(ranks), inherited, at_start, first_path, began, read
            )
            if act is not None:
                return act
    code = None if module else process.compiled(program)
    task = _receive(control)
    if task is None:
        os._exit(1)
    _take_over(*task)
    _take_streams(files)
    os.write(answer, b"r")
    if os.read(control, 1) != b"g":
        os._exit(1)
    os.close(control)
    os.close(answer)
    if ranks is not None:
        blank_ranks.attach(origin, why)
    if module:
        process.forget_module(_MODULE)  # or runpy warns that it was imported already
        return process.run_module(_MODULE)
    return process.run_script(program, code)


def _import_as_rank() -> tuple[str, set[str]]:
    """Import what the launcher imports.

    Returns:
        Why a rank's import would not be equal, "" for equal; the environment variables it reads.
    """
    from . import imports

    reads, printed = imports.Reads(), imports.Printed()
    try:
        __import__(_MODULE)
        why = imports.unequal(printed, reads.names)
    finally:
        reads.stop()
        if text := printed.stop():
            os.write(2, text)
    return (f"torch: {why}" if why else ""), reads.names


def _descriptors() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:  # the listing's own
            continue
        found.append(int(name))
    return found


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().split()
    except OSError:
        return []


def _receive(control: int) -> Task | None:
    """Return the task that arrives on the pipe; None where the keeper closes it without one."""
    head = _read(control, 8)
    body = _read(control, int.from_bytes(head, "little")) if head else b""
    task: Task | None = marshal.loads(body) if body else None  # noqa: S302 - from our own keeper
    return task


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _take_over(
    orig_argv: list[str], argv: list[str], env: dict[str, str], born: dict[str, str]
) -> None:
    """Set the arguments and the environment that a launcher started now would have.

    Args:
        orig_argv: the command line that ps shows, and `sys.orig_argv`.
        argv: `sys.argv`.
        env: the whole environment.
        born: the environment that this agent was started with.
    """
    changed = {name: value for name, value in os.environ.items() if born.get(name) != value}
    removed = [name for name in born if name not in os.environ]
    os.environ.clear()
    os.environ.update(env)
    for name in removed:  # by this process's own start, which would have happened now
        os.environ.pop(name, None)
    os.environ.update(changed)
    sys.argv[:] = argv
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = orig_argv
    process.show(orig_argv)
    shown = orig_argv if argv[0] == "-m" else argv
    process.set_name(os.path.basename(os.fsencode(shown[0])))
    process.start_hooks(is_rank=False)


def _take_streams(files: Sequence[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, fd in enumerate(files, 1):
        os.dup2(fd, number)
        os.close(fd)
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper
