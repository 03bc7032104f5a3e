"""A debugger, tracer or profiler that runs saferun in its own process, and the job there, too.

`python -m debugpy … saferun …`, `viztracer -- saferun …`, `coverage run …` and an IDE's "run with
the debugger" execute our program inside of theirs. Such a tool sees what happens in its process.
Some also replace the functions that start processes, and so follow torchrun to its ranks: pydevd
(under debugpy, VS Code and PyCharm) os.exec*, os.posix_spawn and _posixsubprocess.fork_exec,
viztracer subprocess.Popen.__init__; scalene puts a program of its own into sys.executable. A keeper
between us and torchrun would hide the ranks from it, and an exec would end it. Tools that reach
children by the environment (coverage's subprocess support, ddtrace, OpenTelemetry) need nothing.
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Mapping, Sequence
from typing import NoReturn

from saferun.base import proc
from saferun.system import paths

_NOT_TOOLS = ("runpy", "threading")  # `python -m saferun`; a program that calls us in a thread


def around() -> str:
    """Return the name of the tool that runs our program in its own process; "" for none.

    Such a tool has replaced `__main__` by our program, and is at the bottom of the stack itself.
    """
    if in_notebook():  # its kernel has another `__main__`, too
        return ""
    frames = []
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        frames.append((frame.f_globals, frame.f_code.co_filename))
        frame = frame.f_back
    first, file = next(one for one in reversed(frames) if one[0].get("__name__") != "runpy")
    is_main = first is vars(sys.modules["__main__"])
    if is_main and os.path.isfile(file) and not _is_program(file):
        # debugpy and scalene run a program in the place of their `__main__`, with its globals.
        return _name({"__file__": file})
    if is_main or first.get("__name__") in _NOT_TOOLS:
        return "a debugger" if _starts_processes() else ""
    return _name(first)


def _is_program(file: str) -> bool:
    program = os.path.realpath(sys.argv[0])  # a directory where a script's kit runs
    return os.path.realpath(file) in (program, os.path.join(program, "__main__.py"))


def in_notebook() -> bool:
    """Return whether IPython runs this process; a profiler (scalene) may only have imported it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None


def follower() -> str:
    """Return the name of a tool in this process that follows the processes that it starts."""
    started = getattr(sys.modules.get("subprocess"), "Popen", None)
    code = getattr(getattr(started, "__init__", None), "__code__", None)
    elsewhere = code is not None and code.co_filename != sys.modules["subprocess"].__file__
    exe = proc.link("/proc/self/exe")
    in_front = exe and os.path.realpath(sys.executable) != exe
    # A library that only measures calls also wraps Popen; it does not run our program.
    return around() if elsewhere or in_front or _starts_processes() else ""


def _starts_processes() -> bool:
    """Return whether a tool has replaced functions of the system that start processes."""
    import _posixsubprocess  # built in; only a launch asks

    functions = (os.posix_spawn, _posixsubprocess.fork_exec)
    return not all(isinstance(one, types.BuiltinFunctionType) for one in functions)


def _name(program: Mapping[str, object]) -> str:
    """Return a program's name, from the globals of its `__main__`."""
    if package := str(program.get("__package__") or ""):
        return package.partition(".")[0]
    path = str(program.get("__file__") or "")
    folder, name = os.path.split(path)
    name = os.path.basename(folder) if name == "__main__.py" else name
    return name.removesuffix(".py") or "another program"


def run_here(command: Sequence[str], env: Mapping[str, str], *, is_agent: bool) -> NoReturn:
    """Run a Python program in this process, as the tool would without saferun.

    Args:
        command: a script or `-m` and a module, with its arguments.
        env: the whole environment; it becomes this process's.
        is_agent: the program is torchrun, not a job of plain python.
    """
    from saferun.inject import bootstrap, contract  # 1.5 ms, which no other launch pays

    os.environ.clear()
    os.environ.update(env)
    is_module = command[0] == "-m"
    sys.argv[:] = command[is_module:]
    if contract.VARIABLE in env:
        if is_agent:
            bootstrap.start_agent(command)
        else:
            bootstrap.start()
            bootstrap.settle()
    try:
        if is_module:
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:1] = [os.path.dirname(os.path.realpath(command[0]))]
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:  # scalene takes what is no number for 1, and torchrun ends with None
        raise SystemExit(0 if end.code is None else end.code) from None
    except BaseException as error:  # the program's own, and not a fault of saferun
        trace = error.__traceback__
        while trace and trace.tb_next and _is_ours(trace.tb_frame.f_code.co_filename):
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None
    raise SystemExit(0)


def _is_ours(file: str) -> bool:
    return file.startswith(paths.PACKAGE + os.sep) or file in (runpy.__file__, "<frozen runpy>")
