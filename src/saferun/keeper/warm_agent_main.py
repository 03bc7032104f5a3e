"""The program of a warm agent: import torch, wait for a task, and become the launcher.

Loaded by path in the launcher's own Python, which may have no saferun: this file alone, the
standard library, Python >= 3.9. warm_agent.py is the keeper's side of it.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sys

TYPE_CHECKING = False  # typing costs a keeper 10 ms
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, TracebackType

    Task = tuple[list[str], list[str], dict[str, str], dict[str, str]]  # see `_take_over`

MARSHAL_VERSION = 2  # a format that every Python reads and writes
_THIS_FILE = (lambda: 0).__code__.co_filename  # __file__, also where there is none
_KEPT = ("__name__", "__builtins__", "__annotations__")  # __main__ has them for any program
_MODULE = "torch.distributed.run"
_INJECT = "SAFERUN_INJECT"


def wait(program: str, control: int, answer: int, *files: int) -> None:
    """Import what the launcher imports, wait for a task, and become the launcher.

    Args:
        program: the launcher's program, or "-m" for `-m torch.distributed.run`.
        control: descriptor that the task is read from, and then one byte to go on.
        answer: descriptor that one byte is written to when the task has been taken over.
        files: what becomes descriptors 1 and 2.
    """
    _hide_our_frames()
    for fd in (control, answer, *files):
        os.set_inheritable(fd, False)
    _set_process_name(b"saferun-warm")
    module = program == "-m"
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.realpath(program)))
    __import__(_MODULE)
    code = None if module else _compiled(program)
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
    _become(program, code)


def _compiled(program: str) -> CodeType:
    with open(program, "rb") as file:
        code: CodeType = compile(file.read(), program, "exec", dont_inherit=True)
        return code


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
    _show(orig_argv)
    shown = orig_argv if argv[0] == "-m" else argv
    _set_process_name(os.path.basename(os.fsencode(shown[0])))
    if _INJECT in env and not sys.flags.ignore_environment:
        _start_injection()


def _start_injection() -> None:
    """Do what our sitecustomize does first in an agent; an error of ours stops no job."""
    try:
        package = type(sys)("_saferun_inject")
        ours = os.path.dirname(os.path.dirname(os.path.abspath(_THIS_FILE)))
        package.__path__ = [os.path.join(ours, "inject")]
        sys.modules["_saferun_inject"] = package
        from _saferun_inject import bootstrap  # type: ignore[import-not-found]  # loaded from its place

        bootstrap.start()
    except Exception as error:
        sys.stderr.write(f"saferun: inject: {type(error).__name__}: {error}\n")


def _take_streams(files: Sequence[int]) -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for number, fd in enumerate(files, 1):
        os.dup2(fd, number)
        os.close(fd)
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a TextIOWrapper


def _become(program: str, code: CodeType | None) -> None:
    """Execute the launcher's program as the interpreter would have."""
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if name not in _KEPT]:
        delattr(main, name)
    if code is None:
        import runpy

        parent, _, name = _MODULE.rpartition(".")
        vars(sys.modules[parent]).pop(name, None)  # or runpy warns that it was imported already
        sys.modules.pop(_MODULE, None)
        vars(main).update(__doc__=None, __package__=None, __loader__=None, __spec__=None)
        runpy._run_module_as_main(_MODULE)  # type: ignore[attr-defined]  # what `python -m` calls
        return
    from importlib.machinery import SourceFileLoader

    loader = SourceFileLoader("__main__", program)
    facts = {"__file__": program, "__cached__": None, "__doc__": None, "__package__": None}
    vars(main).update(facts, __loader__=loader, __spec__=None)
    exec(code, vars(main))  # noqa: S102 - the launcher's own program


def _hide_our_frames() -> None:
    """Let tracebacks begin where a launcher's would."""
    show, ours = sys.excepthook, ("<string>", _THIS_FILE)

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        sys.excepthook = show
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = shown


def _set_process_name(name: bytes) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(name[:15])


def _show(argv: list[str]) -> None:
    """Write `argv` over our own command line, which ps and pgrep -f read."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    except (OSError, IndexError, ValueError):
        return
    text = b"".join(os.fsencode(word) + b"\0" for word in argv)[: end - start - 1]
    if not 0 < start < end:
        return
    # A kernel or a sandbox may forbid it, and wrong numbers hurt nobody: the file refuses them.
    with contextlib.suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as file:
        file.seek(start)
        file.write(text.ljust(end - start, b"\0"))
