"""The user's torchrun: the program, its interpreter and the version of its torch.

Only files are read; nothing is started (torchrun_probe.py does that). saferun may be installed in
another environment than torch, so nothing here imports torch or searches saferun's own `sys.path`
first.

Sources: CPython's Lib/site.py and Modules/getpath.py (where a Python looks for packages),
torch/distributed/run.py (`PYTHON_EXEC`, `sys.executable`), the first lines that pip, uv and conda
write (https://packaging.python.org/en/latest/specifications/entry-points/).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from saferun.base import files
from saferun.errors import UnavailableError
from saferun.system import paths
from saferun.system.paths import on_path

_HEAD_BYTES = 4096
# Patterns are compiled at their first use: compiling all of them would cost each launch 0.6 ms.
_PYTHON = r"(?:python|pypy)[\d.]*t?$"
_TAG = r"python(\d+\.\d+t?)$"
# Second line of a script whose interpreter's path is too long for a `#!` line or contains blanks
# (pip and conda), and of a script in a relocatable environment (uv).
_TRAMPOLINE = rb"""'''exec'\s+(?:"([^"$]+)"|'([^']+)'|([^\s"'$]+))((?:\s+-\w+)*)\s+"\$0\""""
_TRAMPOLINE_BESIDE = rb"""'''exec'\s+"\$\(dirname .*?"\$0"\)"\)"/'?([\w.]+)'?"""
# A script that starts saferun has the command, outside comments and not within a name, or the
# import.
_WRAPS_US = (
    rb"(?m)^(?![ \t]*#)[^\n]*(?<![\w.$-])saferun(?![\w./=-])"
    rb"|^[ \t]*(?:from|import)\s+saferun\b"
)
_VERSION = r"(?m)^__version__\s*(?::\s*\w+\s*)?=\s*['\"]([^'\"]+)['\"]"


class Launcher(NamedTuple):
    """How torchrun is started."""

    argv: tuple[str, ...]  # ("/venv/bin/torchrun",)
    interpreter: str | None = None  # the Python of its first line; None if it is a shim
    flags: str = ""  # that Python's own flags, as letters: "sP" for `python3 -sP`
    prefix: str | None = None  # that Python's sys.prefix; None without an interpreter
    remark: str = ""  # says which of two environments is meant, and why


def find_launcher(environ: Mapping[str, str]) -> Launcher:
    """Find the user's torchrun.

    It is the first on PATH that is not saferun itself. If saferun was started by its path, from an
    environment with torch whose programs are not on PATH (cron, an IDE), it is the one beside
    saferun.

    Args:
        environ: the user's environment; only PATH is read.

    Returns:
        That program; if there is none, torch.distributed.run under saferun's own interpreter,
        which, like torchrun, imports nothing from the working directory.

    Raises:
        UnavailableError: neither exists, or that torch is incomplete.
    """
    ours = _own_programs()
    found = filter(None, (_launcher(path, ours, environ) for path in on_path("torchrun", environ)))
    first, own = next(found, None), _own_launcher(ours, environ)
    if first is None:
        return own or _own_module()
    if own is None or is_our_environment(first.interpreter):
        return first
    if _is_on_path(environ):
        if first.prefix is None:  # a shim, which may lead to our environment
            return first
        why = f"it is the first on PATH; {own.argv[0]} beside saferun's own torch is not meant"
        return first._replace(remark=f"{first.argv[0]} starts the job: {why}")
    why = f"saferun was started by its path, and so {first.argv[0]} on PATH is not meant"
    return own._replace(remark=f"{own.argv[0]} starts the job: {why}")


def _launcher(path: str, ours: set[str], environ: Mapping[str, str]) -> Launcher | None:
    """Return a program as the launcher; None if it is saferun itself, or starts it."""
    head = files.read(path, _HEAD_BYTES, follow=True)
    if os.path.realpath(path) in ours or _wraps_us(head):
        return None
    interpreter, flags = _interpreter(head, path, environ)
    return Launcher((path,), interpreter, flags, _prefix(interpreter))


def _own_launcher(ours: set[str], environ: Mapping[str, str]) -> Launcher | None:
    """Return the torchrun of the environment whose saferun runs; None if it has none."""
    program = os.path.join(os.path.dirname(sys.executable), "torchrun")
    if not _runs_saferun() or not os.access(program, os.X_OK):
        return None
    found = _launcher(program, ours, environ)
    has_torch = found and is_our_environment(found.interpreter) and _torch_in(sys.path)
    return found if has_torch else None


def _runs_saferun() -> bool:
    """Return whether this process was started as saferun, and does not only import it."""
    return bool(sys.argv) and _real(sys.argv[0]) in _own_files()


def _is_on_path(environ: Mapping[str, str]) -> bool:
    """Return whether a shell finds our environment's programs by their names."""
    folders = environ.get("PATH", os.defpath).split(os.pathsep)
    if _real(os.path.dirname(sys.executable)) in map(_real, folders):
        return True
    names = ("saferun", os.path.basename(sys.argv[0]))  # a link `torchrun` may lead to us
    found = (path for name in names for path in on_path(name, environ))
    return not _own_files().isdisjoint(map(_real, found))


def _own_module() -> Launcher:
    safe = bool(getattr(sys.flags, "safe_path", False))
    folder = _torch_in(sys.path if safe else sys.path[1:])  # [0] is the program's directory
    if sys.executable and folder:
        program = os.path.join(folder, "torch", "distributed", "run.py")
        if not os.path.isfile(program):
            raise UnavailableError(
                "this torch has no launcher: torch.distributed.run is missing",
                where=program,
                fix="install torch anew",
            )
        if sys.version_info >= (3, 11):
            argv = (sys.executable, "-P", "-m", "torch.distributed.run")
            return Launcher(argv, sys.executable, "P", _prefix(sys.executable))
        return Launcher((sys.executable, program), sys.executable, "", _prefix(sys.executable))
    raise UnavailableError(
        "there is no torchrun",
        where=f"PATH, and saferun's own Python ({sys.executable}) has no torch",
        fix="activate the environment that has torch, or install torch beside saferun",
    )


def of_python(program: str) -> Launcher:
    """Return a Python as the launcher of the job; the packages behind a shim are not known."""
    return Launcher((program,), program, "", _prefix(program))


def is_our_environment(interpreter: str | None) -> bool:
    """Return whether a Python is that of saferun's own environment."""
    prefix = _prefix(interpreter)
    return prefix is not None and os.path.realpath(prefix) == os.path.realpath(sys.prefix)


def worker_interpreter(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Return the Python that torchrun starts the workers with; None if unknown.

    torchrun uses `PYTHON_EXEC` for them if it is set, else its own interpreter.
    """
    chosen = environ.get("PYTHON_EXEC")
    if chosen is None:
        return launcher.interpreter
    if "/" in chosen:
        return chosen
    return next(on_path(chosen, environ), None) if chosen else None


def torch_version(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Return the version of the launcher's torch ("2.13.0+cpu"), read from torch/version.py.

    Nothing is imported or started. The result is None if the file is not found: torchrun is a shim,
    or a .pth file or an import hook leads to torch.
    """
    for folder in _search_path(launcher, environ):
        package = os.path.join(folder, "torch")
        try:
            with open(os.path.join(package, "version.py"), encoding="utf-8") as file:
                found = re.search(_VERSION, file.read(_HEAD_BYTES))
            return found[1] if found else None
        except (OSError, ValueError):
            if os.path.exists(os.path.join(package, "__init__.py")):
                return None  # a torch without a version hides later ones in the path
    return None


# --- finding the program


def _own_programs() -> set[str]:
    """Return the real paths under which saferun itself can be found."""
    started = sys.argv[0] if sys.argv else ""
    return _own_files() | ({_real(started)} if os.path.exists(started) else set())


def _own_files() -> set[str]:
    names = (
        os.path.join(os.path.dirname(sys.executable), "saferun"),
        os.path.join(paths.PACKAGE, "__main__.py"),
    )
    return {_real(name) for name in names if os.path.exists(name)}


def _real(path: str) -> str:
    """Return a path without links; a relative one unchanged if the directory was deleted."""
    path = paths.absolute(path)
    return os.path.realpath(path) if os.path.isabs(path) else path


def _wraps_us(head: bytes) -> bool:
    """Return whether a script starts saferun; the text is what follows the interpreter lines."""
    if not head.startswith(b"#!") or b"saferun" not in head:
        return False
    lines = head.split(b"\n")[1:]
    body = b"\n".join(line for line in lines if not line.startswith(b"'''exec'"))
    return re.search(_WRAPS_US, body) is not None


def _interpreter(head: bytes, path: str, environ: Mapping[str, str]) -> tuple[str | None, str]:
    """Return the Python in a program's first lines, and its flags; None if there is no Python."""
    first, _, rest = head.partition(b"\n")
    argv = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
    if argv and os.path.basename(argv[0]) == "env":
        del argv[0]
        while argv and (argv[0].startswith("-") or "=" in argv[0]):
            del argv[0]
        argv[:1] = [next(on_path(name, environ), "") for name in argv[:1]]
    elif argv and not _is_python(argv[0]):
        argv = _trampoline(rest, path)
    if not argv or not _is_python(argv[0]):
        return None, ""
    return argv[0], "".join(arg[1:] for arg in argv[1:] if arg.startswith("-"))


def _is_python(program: str) -> bool:
    return re.match(_PYTHON, os.path.basename(program)) is not None


def _trampoline(rest: bytes, path: str) -> list[str]:
    """Return the interpreter and flags of a `'''exec' …` line, which sh runs and Python skips."""
    beside = re.match(_TRAMPOLINE_BESIDE, rest)
    if beside:
        return [os.path.join(os.path.dirname(os.path.realpath(path)), os.fsdecode(beside[1]))]
    found = re.match(_TRAMPOLINE, rest)
    if not found:
        return []
    program = found[1] or found[2] or found[3]
    return [os.fsdecode(program), *os.fsdecode(found[4]).split()]


# --- finding its packages


def _prefix(interpreter: str | None) -> str | None:
    """Return sys.prefix of a Python: its virtual environment, else the place of its file."""
    if interpreter is None:
        return None
    environment = os.path.dirname(os.path.dirname(interpreter))
    if os.path.exists(os.path.join(environment, "pyvenv.cfg")):
        return environment
    return os.path.dirname(os.path.dirname(os.path.realpath(interpreter)))


def _torch_in(folders: list[str]) -> str:
    """Return the first folder that has torch; "" if none has."""
    found = (f for f in folders if os.path.isfile(os.path.join(f, "torch", "__init__.py")))
    return next(found, "")


def _search_path(launcher: Launcher, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the folders in which the launcher's Python looks for packages, in its order."""
    if launcher.interpreter is None or launcher.prefix is None:
        return
    flags = launcher.flags
    if "E" not in flags and "I" not in flags and environ.get("PYTHONPATH"):
        yield from map(paths.absolute, environ["PYTHONPATH"].split(os.pathsep))
    config = _venv_config(launcher.prefix)
    tag = _tag(launcher.interpreter, launcher.prefix, config)
    base = launcher.prefix
    if "home" in config:
        yield from _site_folders(launcher.prefix, tag)
        if config.get("include-system-site-packages", "").lower() != "true":
            return
        base = os.path.dirname(config["home"])
    if "s" not in flags and "I" not in flags and not environ.get("PYTHONNOUSERSITE"):
        home = environ.get("PYTHONUSERBASE") or os.path.join(environ.get("HOME", ""), ".local")
        yield os.path.join(home, "lib", "python" + tag, "site-packages")
    yield from _site_folders(base, tag)


def _site_folders(prefix: str, tag: str) -> Iterator[str]:
    """Yield the package folders below a prefix, including those of Debian and Fedora."""
    python = "python" + tag
    if prefix == "/usr":
        yield f"/usr/local/lib/{python}/dist-packages"
        yield f"/usr/local/lib64/{python}/site-packages"
        yield f"/usr/local/lib/{python}/site-packages"
    yield os.path.join(prefix, "lib64", python, "site-packages")
    yield os.path.join(prefix, "lib", python, "site-packages")
    yield os.path.join(prefix, "lib", "python3", "dist-packages")
    yield os.path.join(prefix, "lib", python, "dist-packages")


def _venv_config(prefix: str) -> dict[str, str]:
    """Return the keys of a virtual environment's pyvenv.cfg; empty for any other Python."""
    try:
        with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8") as file:
            pairs = [line.partition("=") for line in file]
    except (OSError, ValueError):
        return {}
    return {key.strip().lower(): value.strip() for key, _, value in pairs}


def _tag(interpreter: str, prefix: str, config: Mapping[str, str]) -> str:
    """Return "3.11" (or "3.13t"), as in the names of a Python's folders; "" if unknown."""
    named = re.search(_TAG, os.path.realpath(interpreter))
    if named:
        return named[1]
    version = config.get("version") or config.get("version_info") or ""
    if version:
        return ".".join(version.split(".")[:2])
    try:
        found = [re.search(_TAG, name) for name in os.listdir(os.path.join(prefix, "lib"))]
    except OSError:
        return ""
    tags = [match[1] for match in found if match]
    return tags[0] if len(tags) == 1 else ""
