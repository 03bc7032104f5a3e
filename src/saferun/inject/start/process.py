"""Make this process equal to a Python that was newly started with a command line.

It has imported modules, alone or as a fork of a process that did. The results of the imports stay;
everything that a start makes is made again: arguments, environment, path, streams, random numbers
and `__main__`.

One thing cannot be made again (docs/warm.md): the hash seed of texts, which forks share.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys

from ...base import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import ModuleType, TracebackType
    from typing import Any

    Act = Callable[[], object]
    Task = tuple[list[str], int, dict[str, str]]  # see `become`

_KEPT = ("__name__", "__builtins__", "__annotations__")  # __main__ has these for any program
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HIDDEN = ("<string>", OURS)  # files of the frames below a program's
_UNBUFFERED = 2  # _IONBF in stdio.h


def environment_at_start() -> dict[str, str]:
    """Return the environment with which this process was executed, before any code changed it.

    Raises:
        OSError: it cannot be read.
    """
    found = proc.environ("self")
    if not found:
        raise OSError("/proc/self/environ cannot be read")
    return found


def add_first_path(program: str) -> str | None:
    """Add the entry that a Python puts first on sys.path; return it, None if it adds none.

    Args:
        program: a script, or "-m".
    """
    if sys.flags.isolated or getattr(sys.flags, "safe_path", False):
        return None
    entry = os.getcwd() if program == "-m" else os.path.dirname(os.path.realpath(program))
    sys.path.insert(0, entry)
    return entry


def become(
    task: Task, born: Mapping[str, str], first_path: str | None, *, is_agent: bool = False
) -> Act:
    """Become the process of a command line; return a function that executes it, to call once.

    Args:
        task: three items. The first is the command line for ps and `sys.orig_argv`: a Python and
            its flags, then a script, or `-m` and a module, and their arguments. The second is the
            index of the script or the `-m` in it. The third is the whole environment; changes that
            this process made to its own since its start are made in it, too.
        born: this process's environment at its start.
        first_path: the entry of sys.path for the earlier program; None for none.
        is_agent: the process is torchrun's agent, not a rank or a plain python job.
    """
    argv, at, env = task
    changed = {name: value for name, value in os.environ.items() if born.get(name) != value}
    kept = {name: value for name, value in env.items() if name in os.environ or name not in born}
    os.environ.clear()
    os.environ.update({**kept, **changed})
    program, arguments = argv[at], argv[at + 1 :]
    module = program == "-m"
    sys.argv[:] = [program, *arguments[module:]]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = argv
    _show(argv, env)
    if "-u" in argv[1:at]:
        _unbuffer()
    if first_path is not None:
        _forget_path(first_path)
    add_first_path(program)
    if not is_agent:
        _draw_new_random_numbers()
    start_hooks(settle=not is_agent)
    return run_module(arguments[0]) if module else run_script(absolute(program))


def absolute(script: str) -> str:
    """Return a script's `__main__.__file__`: CPython puts the directory before a relative path."""
    if os.path.isabs(script):
        return script
    return os.path.join(os.getcwd(), script[2:] if script.startswith("./") else script)


def run_script(path: str) -> Act:
    """Make a script's `__main__`; return a function that executes the script."""
    from importlib.machinery import SourceFileLoader

    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = _empty_main()
    sys.path_importer_cache.setdefault(path, None)  # the interpreter also creates an entry
    facts = {"__file__": path, "__cached__": None, "__doc__": None, "__package__": None}
    vars(main).update(facts, __loader__=SourceFileLoader("__main__", path), __spec__=None)
    return functools.partial(exec, code, vars(main))


def run_module(name: str) -> Act:
    """Make the `__main__` of `python -m`; return a function that executes the module."""
    import runpy

    main = _empty_main()
    vars(main).update(__doc__=None, __package__=None, __loader__=None, __spec__=None)
    return functools.partial(runpy._run_module_as_main, name)  # type: ignore[attr-defined]  # what `python -m` calls


def start_hooks(*, settle: bool) -> None:
    """Do the work of our sitecustomize if SAFERUN_INJECT is set; our own error stops no job.

    Args:
        settle: hook the modules that are imported already; an agent that has imported torch is not
            hooked.
    """
    if "SAFERUN_INJECT" not in os.environ or sys.flags.ignore_environment:
        return
    try:
        from .. import bootstrap

        bootstrap.start()
        if settle:
            bootstrap.settle()
    except Exception as error:
        sys.stderr.write(f"saferun: inject: {type(error).__name__}: {error}\n")


def load_hooks() -> None:
    """Import the hooks, which every rank needs, without installing them."""
    from .. import bootstrap, hook_runner, receipts  # noqa: F401 - loaded ahead
    from ..targets import MODULES, TARGETS

    parts = {part for name in TARGETS if name in sys.modules for part in TARGETS[name]}
    for part in sorted(parts):
        __import__(f"{__package__.rpartition('.')[0]}.hooks.{MODULES.get(part, part)}")


def take_files(files: Sequence[int]) -> None:
    """Make the given descriptors 1 and 2."""
    for number, fd in enumerate(files, 1):
        os.dup2(fd, number)
        os.close(fd)


def set_name(name: bytes) -> None:
    """Set the process name that ps and top show."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(name[:15])


def _show(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Overwrite our command line and environment as ps, pgrep -f and the watch read them.

    Both are cut at the size that the process was started with. A rank is found by its RANK, which
    comes first; SAFERUN_INJECT, for which there was no room, comes last.
    """
    fields = proc.stat("self") or []
    _write_over(fields[45:47], argv)  # arg_start and arg_end, proc(5)
    last = {"SAFERUN_INJECT": 2}
    names = sorted(env, key=lambda n: last.get(n, not n.endswith(("RANK", "WORLD_SIZE"))))
    _write_over(fields[47:49], [f"{name}={env[name]}" for name in names])


def _write_over(limits: Sequence[str], words: Sequence[str]) -> None:
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    # A kernel or a sandbox may forbid it. Wrong numbers do no harm: the kernel refuses them.
    with contextlib.suppress(OSError, ValueError):
        start, end = map(int, limits)
        if 0 < start < end:
            with open("/proc/self/mem", "r+b", buffering=0) as file:
                file.seek(start)
                file.write(text[: end - start - 1].ljust(end - start, b"\0"))


def hide_frames(error: BaseException) -> BaseException:
    """Let the traceback of this process's last error begin in the program; return the error.

    Args:
        error: the program's exception, or a Ctrl-C that came after it.
    """
    show_error = sys.excepthook
    if isinstance(error, KeyboardInterrupt) and error.__context__ is not None:
        error = error if _in_program(error.__traceback__) else error.__context__

    def excepthook(kind: type[BaseException], value: BaseException, trace: Any) -> None:
        sys.excepthook = show_error
        trace = _in_program(trace)
        show_error(kind, value.with_traceback(trace), trace)

    if not isinstance(error, SystemExit):
        sys.excepthook = excepthook
    return error


def _in_program(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_HIDDEN):
        trace = trace.tb_next
    return trace


def _empty_main() -> ModuleType:
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if name not in _KEPT]:
        delattr(main, name)
    return main


def _forget_path(entry: str) -> None:
    if sys.path[:1] == [entry]:
        del sys.path[0]
    if entry not in sys.path:
        sys.path_importer_cache.pop(entry, None)


def _unbuffer() -> None:
    """Make the streams unbuffered, as under `-u`. The objects stay: imported modules hold them."""
    import ctypes
    import io

    streams: tuple[Any, Any] = (sys.stdout, sys.stderr)
    for fd, stream in enumerate(streams, 1):
        if isinstance(stream, io.TextIOWrapper):
            encoding, errors, name = stream.encoding, stream.errors, stream.name
            stream.flush()
            raw: Any = io.FileIO(fd, "wb", closefd=False)
            raw.name = name
            again: Any = stream
            again.__init__(raw, encoding, errors, newline="\n", write_through=True)
            again.mode = "w"
    libc = ctypes.CDLL(None)
    for name in ("stdin", "stdout", "stderr"):
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _UNBUFFERED, 0)


def _draw_new_random_numbers() -> None:
    """Redraw the random numbers that a start gets from the kernel; `random` did so at the fork."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if process := sys.modules.get("multiprocessing.process"):
        key = process.AuthenticationString(os.urandom(32))
        process.current_process()._config["authkey"] = key
