"""Run a program in this process, and mark each Python that it starts: `follower.py WAY PROGRAM …`.

A Python's options then have `-X followed`. WAY is how the tool gets there: "popen" as viztracer,
"fork_exec" as pydevd, "executable" as scalene, "none" for a profiler that follows nobody.
"""

import _posixsubprocess
import os
import runpy
import shlex
import subprocess
import sys
import tempfile
import types


def marked(argv):
    if not os.path.basename(os.fsdecode(argv[0])).startswith("python"):
        return argv
    words = ("-X", "followed")
    more = words if isinstance(argv[0], str) else map(str.encode, words)
    return [argv[0], *more, *argv[1:]]


def replace(module, name, at):
    original = getattr(module, name)

    def replacement(*arguments, **named):
        changed = list(arguments)
        if "args" in named:
            named["args"] = marked(named["args"])
        else:
            changed[at] = marked(changed[at])
        return original(*changed, **named)

    setattr(module, name, replacement)


way = sys.argv[1]
if way == "popen":
    replace(subprocess.Popen, "__init__", 1)
if way == "fork_exec":
    if hasattr(subprocess, "_fork_exec"):  # from Python 3.11 on
        replace(subprocess, "_fork_exec", 0)
    replace(_posixsubprocess, "fork_exec", 0)
    replace(os, "posix_spawn", 1)
    replace(os, "execve", 1)
sys.argv[:] = sys.argv[2:]
with tempfile.TemporaryDirectory() as folder:
    try:
        if way == "executable":
            line = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -X followed "$@"\n'
            sys.executable = os.path.join(folder, "python")
            with open(sys.executable, "w", encoding="utf-8") as file:
                file.write(line)
            os.chmod(sys.executable, 0o755)
            sys.modules["IPython"] = types.ModuleType("IPython")  # it loads that, too
            with open(sys.argv[0], encoding="utf-8") as file:
                exec(compile(file.read(), sys.argv[0], "exec"), vars(sys.modules["__main__"]))
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        sys.exit(end.code if isinstance(end.code, int) else 1)  # as scalene
    finally:
        print("the tool sees the end", flush=True)
