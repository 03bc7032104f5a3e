"""Import ahead what ranks will import, and find out what would make the result different.

Reasons are output, a thread, an open GPU, or a variable that differs between ranks. A module with
one of these, and all that follow it in the list, is left to the ranks.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import time

from ...base import proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence
    from typing import Any

# Variables that torchrun sets for a rank
# (torch/distributed/elastic/agent/server/local_elastic_agent.py).
RANK_VARIABLES = frozenset(
    (
        *("LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE"),
        *("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"),
        *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    )
)
# Native code reads these when it is loaded, without os.environ: OpenMP, MKL, oneDNN, OpenBLAS,
# libc.
_NATIVE = (
    *("OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "DNNL_", "ONEDNN_", "TBB_", "LD_"),
    *("MALLOC_", "GLIBC_", "PYTHON", "LC_", "LANG", "TZ", "COVERAGE_", "NSYS_", "CUDA_INJECTION"),
)
_OPENBLAS = "openblas"  # NumPy and SciPy each have one
_LEFT, _LEFT_S = ".left", 7 * 86400  # suffix of a note, and how long it is valid
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # with it torch.cuda.is_available() does not use the driver


def _listed(path: str) -> tuple[list[str], set[str]]:
    """Return the list of an earlier start (imported_modules.py): modules, and variables.

    The modules end before one that was left to the ranks in the last week: finding that out again
    would cost a second import.

    Args:
        path: the list's path; without a file the list is empty.
    """
    lines, left = (_text(name).split("\n") for name in (path, path + _LEFT))
    assigned = {line[:-1] for line in lines if line.endswith("=")}
    names = [line for line in lines if line and not line.endswith("=")]
    if left[0] in names and time.time() - os.stat(path + _LEFT).st_mtime < _LEFT_S:
        names = names[: names.index(left[0])]
    return names, assigned


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read().decode("utf-8", "surrogateescape")
    return ""


class Seen:
    """A context manager that notes effects of imports that would make a later program differ.

    Inside it, descriptors 1 and 2 are memory files.
    """

    def __init__(self) -> None:
        self.read: set[str] = set()  # environment variables that Python code has read
        self.printed = b""
        self._ended = _mapped(_OPENBLAS)  # a fork ended their threads
        self._encode = os.environ.encodekey
        self._memory = os.memfd_create("saferun-printed")
        self._saved = [os.dup(fd) for fd in (1, 2)]

    def __enter__(self) -> Seen:
        def encode(key: str) -> str:
            self.read.add(key)
            return self._encode(key)

        os.environ.encodekey = encode
        for fd in (1, 2):
            os.dup2(self._memory, fd)
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        os.environ.encodekey = self._encode
        for fd, saved in zip((1, 2), self._saved):
            os.dup2(saved, fd)
        for fd in (*self._saved, self._memory):
            os.close(fd)

    def _flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.printed = os.pread(self._memory, os.fstat(self._memory).st_size, 0)

    def unequal(self, *, forks: bool) -> str:
        """Return why the imports differ from those of a rank; "" if they do not.

        Args:
            forks: this process will fork, and a fork would lack any thread.
        """
        self._flush()
        if self.printed:
            return "it prints when it is imported"
        if read := sorted(RANK_VARIABLES.intersection(self.read)):
            return f"it reads {read[0]} when it is imported"
        gpus = ("/dev/nvidia", "/dev/kfd", "/dev/dri")  # forks could not use them if open
        opened = [path for path in proc.descriptors("self").values() if path.startswith(gpus)]
        if opened:
            return f"it opens {opened[0]} when it is imported"
        return "it starts threads when it is imported" if forks and _threads(self._ended) else ""


def _threads(ended: set[str]) -> int:
    """Return the number of threads besides this one and those of OpenBLAS.

    OpenBLAS starts threads when it is loaded, ends them before a fork and starts them again when
    they are needed (pthread_atfork in its driver/others/memory.c).

    Args:
        ended: paths of OpenBLAS libraries whose threads a fork has ended.
    """
    count = len(os.listdir("/proc/self/task")) - 1
    return count and max(0, count - sum(map(_threads_of, _mapped(_OPENBLAS) - ended)))


def _mapped(*parts: str) -> set[str]:
    """Return the paths of loaded files that contain one of some texts."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        paths = {line.split(None, 5)[-1].strip() for line in file}
    return {path for path in paths if any(part in path for part in parts)}


def _threads_of(path: str) -> int:
    import ctypes

    for prefix in ("scipy_openblas", "openblas"):
        for ending in ("64_", ""):
            try:
                count = getattr(ctypes.CDLL(path), f"{prefix}_get_num_threads{ending}")
            except (OSError, AttributeError):  # no such library, or a build with another name
                continue
            return int(count()) - 1
    return 0


class Imported:
    """This process's imports, to decide whether a program would now import the same.

    Args:
        born: the environment before the imports.
        path: an earlier start's list: `names`, and the variables that it has assigned.
        at_start: modules that any Python has before its program begins.
        read: environment variables that the imports have read so far.
    """

    def __init__(
        self, born: Mapping[str, str], path: str, at_start: Container[str], read: Iterable[str] = ()
    ) -> None:
        self.born, self._read = dict(born), set(read)
        self._path, self._at_start = path, at_start
        self.names, self._assigned = _listed(path)

    def add(self, *, forks: bool) -> tuple[list[str], str]:
        """Import the modules in their order, once; note which one must be left to the program.

        Args:
            forks: this process will fork.

        Returns:
            The names before the module that must be left, and the reason; all names and "" if there
            is none.
        """
        is_ours = _NVML not in os.environ
        os.environ.setdefault(_NVML, "1")
        with Seen() as seen:
            left, why = _import(self.names, seen, forks=forks)
        if why:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            path, name = self._path + _LEFT, self.names[len(left)]
            with contextlib.suppress(OSError), open(os.open(path, flags, 0o600), "wb") as file:
                file.write(name.encode("utf-8", "surrogateescape"))
        if is_ours:
            del os.environ[_NVML]
        self._read |= seen.read
        # An import has now assigned its variables, with the values that it gives.
        self._assigned = {n for n in self._assigned if os.environ.get(n) == self.born.get(n)}
        files = {getattr(one, "__dict__", {}).get("__file__") for one in sys.modules.values()}
        self._stamps = {file: _stamp(file) for file in files if isinstance(file, str)}
        return left, why

    def refusal(self, program: Sequence[str], env: Mapping[str, str], folder: str) -> str:
        """Return why a program must be started as usual; "" if it need not be.

        Args:
            program: a script, or `-m` and a module, and their arguments.
            env: the program's whole environment.
            folder: the program's working directory.
        """
        assigned = self._assigned
        if program[0] != "-m":
            if why := _not_a_text(program[0]):
                return why
            folder = os.path.dirname(os.path.realpath(program[0]))
            assigned = assigned | assigned_variables(program[0])
        changed = {name for name in {*env, *self.born} if env.get(name) != self.born.get(name)}
        changed = {name for name in changed - RANK_VARIABLES if not name.startswith("SAFERUN_")}
        for name in sorted(changed | assigned):
            if self._is_read(name):
                return f"{name} is set after what reads it was imported"
        return self._shadowing(folder)

    def _is_read(self, name: str) -> bool:
        if name.startswith("KMP_") and not _mapped("libiomp", "libomp"):
            return name in self._read  # GNU's OpenMP, which torch's wheels have, reads no other
        return name in self._read or name.startswith(_NATIVE)

    def changed(self) -> str:
        """Return the reason for a usual start if a file has changed since its import; else ""."""
        found = next((path for path, stamp in self._stamps.items() if _stamp(path) != stamp), "")
        return found and f"{found} has changed since it was imported"

    def _shadowing(self, folder: str) -> str:
        """Return a reason if a file would be imported in place of a module; else ""."""
        with contextlib.suppress(OSError):
            for entry in os.listdir(folder):
                name, path = entry.partition(".")[0], os.path.join(folder, entry)
                if name not in sys.modules or name in self._at_start or name == "__main__":
                    continue
                if entry.endswith((".py", ".so")) or os.path.exists(f"{path}/__init__.py"):
                    return f"{path} has the name of a module that is imported already"
        return ""


def _import(names: list[str], seen: Seen, *, forks: bool) -> tuple[list[str], str]:
    why = ""
    for place, name in enumerate(names):
        if name in sys.modules:
            continue
        try:
            __import__(name)
        except BaseException as error:  # a module may also raise SystemExit
            why = f"{type(error).__name__} when it is imported"
        if why := why or seen.unequal(forks=forks):
            return names[:place], f"{name}: {why}"
    return names, ""


def _not_a_text(script: str) -> str:
    try:
        with open(script, "rb") as file:
            is_plain = stat.S_ISREG(os.fstat(file.fileno()).st_mode) and file.read(2) != b"PK"
    except OSError as error:
        return f"{script}: {error.strerror}"
    is_plain = is_plain and not script.endswith(".pyc") and not script.startswith("-")
    return "" if is_plain else f"{script} is not the text of a script"


def _stamp(path: str) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    return 0, 0


def assigned_variables(script: str) -> set[str]:
    """Return the environment variables that a script's text assigns, anywhere in it."""
    import ast

    try:
        with open(script, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return set()
    return {name for node in ast.walk(tree) for name in _assigned_by(node)}


def _assigned_by(node: Any) -> list[str]:
    """Return the variables that a node of a script's text assigns."""
    import ast

    places: list[Any] = []
    method = getattr(getattr(node, "func", None), "attr", "")
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        places = [node.slice] if _is_environ(node.value) else []
    elif method == "putenv" or (method == "setdefault" and _is_environ(node.func.value)):
        places = node.args[:1]
    elif method == "update" and _is_environ(node.func.value):
        places = [key for arg in node.args for key in getattr(arg, "keys", ())]
        places += [ast.Constant(word.arg) for word in node.keywords]
    return [p.value for p in places if isinstance(p, ast.Constant) and isinstance(p.value, str)]


def _is_environ(node: Any) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")) == "environ"
