"""What tests start processes in and with: a user's machine, programs, quoted shell text.

Any path may hold blanks, letters that are not ASCII, "saferun", or be longer than the kernel takes
in a `#!` line (BINPRM_BUF_SIZE, 256 bytes; 128 before Linux 5.1).
"""

from __future__ import annotations

import functools
import json
import locale
import os
import re
import shlex
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import DEADLINE_S, MARK, kill_all, living, until, watched

# All that a shell may hand on to what tests start. The rest of it would change what they see: a
# Python's, conda's or a module's settings, a job of Slurm, Kubernetes or torchrun, a CI, a terminal
# of a width, XDG's places, what NCCL, CUDA and torch read.
_HANDED_ON = re.compile(
    r"PATH|LD_LIBRARY_PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|LANG|LANGUAGE|LC_\w+|TZ|TERM"
    r"|(?i:(?:https?|no|all)_proxy)|(?:PIP|UV|SSL|REQUESTS|CURL|PYENV|NIX)_\w+"  # to reach an index
    r"|CC|CXX|CUDA_HOME|CUDA_PATH"  # where a machine has its compilers
    r"|PYTEST_\w+|SAFERUN_(?:CORPUS|TEST_\w+)|TEST_(?:TENSORFLOW|BASH)|OUT",  # of the tests
)
LINKS = functools.cache(lambda: tempfile.TemporaryDirectory(prefix="saferun-", dir="/tmp"))
OWN_GPUS = "PYTEST_CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/version")

SAFERUN = (sys.executable, "-m", "saferun")
BESIDE = Path(sys.executable).parent  # torchrun's place

SHELLS_OWN = {"PWD", "OLDPWD", "SHLVL", "_"}  # what a shell on the way adds to an environment


def unquoted(path: Path) -> str:
    """Return another name of a path, without blanks: torch gives compilers such names unquoted."""
    return str(_link(path.parent) / path.name)


@functools.cache
def _link(folder: Path) -> Path:
    link = Path(LINKS().name, str(len(os.listdir(LINKS().name))))
    link.symlink_to(folder)
    return link


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what of a shell's environment no test has to fear.

    No GPU is seen: only tests of real ones ask which of them the shell may use.
    """
    kept = {name: value for name, value in environ.items() if _HANDED_ON.fullmatch(name)}
    now = locale.setlocale(locale.LC_ALL)
    try:
        locale.setlocale(locale.LC_ALL, "")
        locale.setlocale(locale.LC_ALL, now)
    except locale.Error:  # it came with an ssh, say; each shell would complain
        kept = {n: v for n, v in kept.items() if not n.startswith(("LANG", "LC_"))}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if DRIVER.exists() else {}
    return {OWN_GPUS: environ.get("CUDA_VISIBLE_DEVICES", "all"), **hidden, **kept}


def no_driver() -> None:
    """Skip where the files of a driver, which nobody can hide, are asked before a test's GPUs."""
    if DRIVER.exists():
        pytest.skip("NVIDIA's driver is loaded here: its GPUs are found before those of a test")


def nvidia_smi(folder: Path, *script: str) -> Path:
    """Write the only source of a machine's GPUs."""
    no_driver()
    return executable(folder / "nvidia-smi", "\n".join(("#!/bin/sh", *script, "")))


def shell(*words: object) -> str:
    """Return words as text for a shell."""
    return shlex.join(map(str, words))


def captured(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; what it printed is text."""
    return subprocess.run(list(map(str, words)), capture_output=True, text=True, **options)


def output(*words: object, **options: Any) -> str:
    """Run a command that succeeds; return what it printed."""
    done = captured(*words, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def own_lines(text: str) -> list[str]:
    """Return what saferun wrote of a stream; its name alone is in paths, too."""
    return [line for line in text.splitlines() if line.startswith("saferun: ")]


def in_ascii(path: object) -> str:
    """Return a path as faulthandler writes it."""
    return str(path).encode("ascii", "backslashreplace").decode()


def frame(path: object, place: str) -> str:
    """Return a line of faulthandler's."""
    return f'File "{in_ascii(path)}", {place}'


def unwrapped(text: str) -> str:
    """Return what was wrapped for a terminal with single blanks: paths decide where lines break."""
    return " ".join(text.replace("\\\n", " ").split())


def text_of(path: Path) -> str:
    """Return what a file holds."""
    return path.read_text(encoding="utf-8")


def write(path: Path, text: str) -> Path:
    """Write a file, in a directory that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def executable(path: Path, text: str) -> Path:
    """Write a program; its text begins with the line of an interpreter that is where it says."""
    write(path, text).chmod(0o755)
    return path


def python_program(source: str, *flags: str, python: str | Path = sys.executable) -> str:
    """Return the text of a program of Python, as pip writes one below a path with blanks.

    The shell executes the second line; to Python it is a part of the first string.
    """
    # A docstring becomes one string with ours: only one may stand before a future import.
    joined = " \\\n" if source.startswith(('"""', "'''")) else "\n"
    words = shell(python, *flags)
    return f"#!/bin/sh\n'''exec' {words} \"$0\" \"$@\"\n' '''{joined}{source}"


def shell_program(*words: object, before: str = "") -> str:
    """Return the text of a program that is some words, with what it is given added.

    Args:
        before: lines of sh that it executes first.
    """
    return f'#!/bin/sh\n{before}\nexec {shell(*words)} "$@"\n'


class Sandbox:
    """A user's machine: a home, an environment, and the mark of all that is started there.

    Args:
        folder: all of it lies there.
        home: another home than the one there.
        cwd: another directory to work in.
        path: directories with programs beside its own `bin` and the system's.
        environ: variables beside those that every job needs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        home: Path | None = None,
        cwd: Path | None = None,
        path: tuple[object, ...] = (BESIDE,),
        **environ: str,
    ) -> None:
        self.folder, self.home, self.cwd = folder, home or folder / "home", cwd or folder
        for place in (self.home, self.cwd):
            place.mkdir(parents=True, exist_ok=True)
        self.runs = self.home / ".local" / "state" / "saferun" / "runs"
        self.bin = folder / "bin"
        self.mark = environ.get(MARK) or uuid.uuid4().hex
        self._started: list[subprocess.Popen[Any]] = []
        kept = ("LD_LIBRARY_PATH", "PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "CUDA_VISIBLE_DEVICES")
        self.environ = {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "PATH": ":".join(map(str, (self.bin, *path, "/usr/sbin:/usr/bin:/sbin:/bin"))),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            MARK: self.mark,
            **environ,
        }

    def program(self, name: str, text: str) -> Path:
        """Put a program on its PATH."""
        return executable(self.bin / name, text)

    def popen(
        self, *command: object, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command there; what it prints can be read, unless `options` say otherwise.

        Args:
            env: more variables.
        """
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            list(map(str, command)),
            env={**self.environ, **(env or {})},
            **{"cwd": self.cwd, **quiet, **options},
        )
        watched[process] = self.mark
        self._started.append(process)
        return process

    def ran(self, *command: object, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command there to its end."""
        with self.popen(*command, text=True, **options) as process:
            out, err = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @property
    def journal(self) -> Path:
        """The directory of the only run."""
        (path,) = self.runs.glob("*-*-*")
        return path

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the events of a name, or all, of the only run."""
        lines = (self.journal / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [event for event in map(json.loads, lines) if name in (None, event["event"])]

    def living(self) -> dict[int, str]:
        """Return {pid: name} of the living processes that were started there."""
        return living(self.mark)

    def nothing_lives(self) -> None:
        """Wait until none of its processes lives."""
        until(lambda: not self.living(), lambda: f"{self.living()} still live")

    def close(self) -> None:
        """End whatever is left."""
        kill_all(self.mark)
        for process in self._started:
            watched.pop(process, None)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    stream.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
