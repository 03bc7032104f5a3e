"""A spare torchrun: an interpreter that has imported torch and waits to become the next attempt.

Half of the time from a rank's death to the next attempt's first line is the new agent's own
`import torch`. A spare has it done. While one attempt runs, the keeper of the next one starts the
launcher's own Python, which does what the launcher's program would do first, the import, and then
blocks on a pipe. When it is handed its task it takes over the task's arguments and environment
and executes the launcher's program, the very file: messages, tracebacks, exit status and signals
are those of a launcher that was started then.

    offer, usable    pure: may there be one, and would a fresh start be the same
    Waiting          the keeper's side: start it, hand a task over
    wait             the spare's own side, loaded by path in the launcher's Python

Standard library only, Python >= 3.9: the launcher's Python may have no saferun.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sys

TYPE_CHECKING = False  # typing costs a keeper 10 ms
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from saferun.plan.torchrun_install import Launcher

_MARSHAL = 2  # a format that every Python reads and writes
_HARMLESS_FLAGS = frozenset("bBEIOPRsSu")  # flags of a Python that take no value

# Only ranks and what they start read these, or torchrun when it is called; everything else means
# another start. Read from torch 2.13: `import torch.distributed.run` with a traced getenv(3) and
# os.environ, torch/distributed/run.py, launcher/api.py and elastic/. Some of the TORCHINDUCTOR_
# and TORCHDYNAMO_ are read by the agent's import, too, into settings that an agent never uses.
_MAY_CHANGE = (
    *("SAFERUN_", "PET_", "NCCL_", "TORCH_NCCL_", "CUDA_", "TORCHINDUCTOR_", "TORCHDYNAMO_"),
    *("TRITON_", "GLOO_", "TF_", "XLA_"),
)
_MAY_CHANGE_EXACTLY = (
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("TORCH_COMPILE_DISABLE", "TORCH_USE_CUDA_DSA", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    *("TORCHELASTIC_ERROR_FILE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
)
_OURS = (lambda: 0).__code__.co_filename  # __file__, also where there is none
_KEPT = ("__name__", "__builtins__", "__annotations__")  # of __main__, the same for any program
_MODULE = "torch.distributed.run"
_INJECT = "SAFERUN_INJECT"


# --- whether ---------------------------------------------------------------------------------


class Spare:
    """What a spare interpreter is made ready for.

    Args:
        argv: the attempt's command line as it is likely to be, the launcher's words first.
        env: its whole environment.
        interpreter: the Python of the launcher's first line.
        flags: that Python's flags, as letters.
    """

    __slots__ = ("argv", "env", "flags", "interpreter")

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], interpreter: str, flags: str = ""
    ) -> None:
        self.argv = tuple(argv)
        self.env = dict(env)
        self.interpreter = interpreter
        self.flags = flags


def offer(launcher: Launcher, argv: Sequence[str], env: Mapping[str, str]) -> Spare | None:
    """Return what to prepare for a command; None where a spare could not stand in for it.

    Args:
        launcher: as `installed.find_launcher` found it.
        argv: the attempt's command line, which begins with the launcher's.
        env: the attempt's environment.
    """
    words = tuple(launcher.argv)
    known = launcher.interpreter is not None and tuple(argv[: len(words)]) == words
    if not known or not set(launcher.flags) <= _HARMLESS_FLAGS or _forks(argv, env):
        return None
    assert launcher.interpreter is not None
    return Spare(argv, env, launcher.interpreter, launcher.flags)


def usable(
    prepared_env: Mapping[str, str],
    env: Mapping[str, str],
    prepared_argv: Sequence[str],
    argv: Sequence[str],
) -> bool:
    """Return whether an interpreter started for the one would be no other for the other.

    The launcher must be the same; its arguments are read when it is called. Variables that only
    ranks read may differ; any that a Python, the dynamic loader or the agent's `import torch` may
    read, and any that we do not know, may not.
    """
    if _program(prepared_argv) != _program(argv) or _forks(argv, env):
        return False
    names = {*prepared_env, *env}
    changed = [name for name in names if prepared_env.get(name) != env.get(name)]
    return all(name.startswith(_MAY_CHANGE) or name in _MAY_CHANGE_EXACTLY for name in changed)


def _program(argv: Sequence[str]) -> tuple[str, ...]:
    return tuple(argv[: 3 if tuple(argv[1:2]) == ("-m",) else 1])


def _forks(argv: Sequence[str], env: Mapping[str, str]) -> bool:
    # --run-path with --start-method fork: ranks are copies of the agent and read what it has read.
    if env.get("PET_START_METHOD", "").startswith("fork"):
        return True
    nexts = [*argv[1:], ""]
    pairs = [(word, after) for word, after in zip(argv, nexts) if word.startswith("--star")]  # noqa: B905 - Python 3.9
    return any("fork" in word or after.startswith("fork") for word, after in pairs)


# --- the keeper's side -----------------------------------------------------------------------

# Short, so that the real command line fits over it; `posix` is built in. `-c` puts the working
# directory first on the path, and a module there must shadow nothing.
_START = "from posix import read;exec(read(%d,%d))"
_BOOT = """import sys
if sys.path[:1] == [""]:
    del sys.path[0]
space = {{"__name__": "saferun_spare"}}
with open({path!r}, "rb") as file:
    exec(compile(file.read(), {path!r}, "exec"), space)
space["wait"]({program!r}, *{passed!r})"""


def order(spare: Spare) -> dict[str, Any]:
    """Return what a keeper is told, in types that marshal knows."""
    # By its command line it is no agent, and our sitecustomize would arm it: that waits until the
    # hand-over.
    env = {name: value for name, value in spare.env.items() if name != _INJECT}
    words = [spare.interpreter, *(["-" + spare.flags] if spare.flags else [])]
    module = _program(spare.argv)[1:2] == ("-m",)
    real = list(spare.argv) if module else [*words, *spare.argv]
    return {"words": words, "env": env, "program": "-m" if module else spare.argv[0], "real": real}


class Waiting:
    """A spare interpreter, as its keeper sees it.

    Args:
        told: what `order` returned, and `ignored` as in a task.
        files: what the job will have as descriptors 1 and 2.
        start: starts a process, as `keeper.start_job` does.

    Raises:
        OSError: it could not be started.
    """

    def __init__(
        self,
        told: dict[str, Any],
        files: Sequence[int],
        start: Callable[[dict[str, Any], list[int]], int],
    ) -> None:
        self._told = told
        self._unsent = memoryview(b"")
        self.files = [os.dup(fd) for fd in files]  # of our own: a channel closes its
        control, self._control = os.pipe()
        os.set_blocking(self._control, False)  # its reader may be importing for a long time yet
        _enlarge(self._control)
        self.answers, answer = os.pipe()
        # What the import says is nobody's before the hand-over: it waits in pipes.
        pipes = [os.pipe() for _ in range(1 if files[0] == files[1] else 2)]
        self._said = [(reading, bytearray()) for reading, _ in pipes]
        ours, theirs = [control, answer], [writing for _, writing in pipes]
        passed = [control, answer, *self.files]
        task = {**told, "argv": self._argv(passed), "own": "group", "passed": passed}
        task["blocked"] = ()
        try:
            self.pid = start(task, [theirs[0], theirs[-1]])
        finally:
            for fd in (*ours, *theirs):
                os.close(fd)
        for fd, _ in self._said:
            os.set_blocking(fd, False)

    def _argv(self, passed: list[int]) -> list[str]:
        """Return the command line; what it is to execute lies ready in the pipe."""
        told = self._told
        path = os.path.abspath(_OURS)
        boot = _BOOT.format(path=path, program=told["program"], passed=passed).encode()
        self._write(boot)
        argv = [*told["words"], "-c", _START % (passed[0], len(boot))]
        # Room for the real command line, which is written over this one.
        room = _size(told["real"]) - _size(argv) - 1
        return [*argv, " " * room] if room > 0 else argv

    def hand_over(self, task: dict[str, Any]) -> bool:
        """Send the task; return whether there is somebody to read it. `answers` tells the rest.

        What does not fit into the pipe goes out with each `listen`.
        """
        told = self._told
        argv = list(task["argv"])
        message = {
            "orig_argv": argv if told["program"] == "-m" else [*told["words"], *argv],
            "argv": ["-m", *argv[3:]] if told["program"] == "-m" else argv,
            "env": task["env"],
            "born": told["env"],
        }
        return self._write(_packed(message))

    def go(self) -> bool:
        """Let it go on; return whether it is still there."""
        return self._write(b"g")

    def _write(self, data: bytes) -> bool:
        self._unsent = memoryview(bytes(self._unsent) + data)
        return self._push()

    def _push(self) -> bool:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._control, self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def listen(self) -> None:
        """Take in what the import says, so that it is not held up by a full pipe; send on."""
        self._push()
        for fd, said in self._said:
            try:
                while data := os.read(fd, 1 << 16):
                    said += data
            except OSError:  # nothing more now
                continue

    def pass_on(self) -> None:
        """Write what the import said to where the job's output goes."""
        self.listen()
        for (_, said), file in zip(self._said, self.files):  # noqa: B905 - Python 3.9
            view = memoryview(said)
            try:
                while view:
                    view = view[os.write(file, view) :]
            except OSError:  # its reader went away
                continue

    def close(self) -> None:
        """Let go of everything; a spare that waits ends."""
        for fd in (self._control, self.answers, *self.files, *(fd for fd, _ in self._said)):
            os.close(fd)


def _enlarge(pipe: int) -> None:
    import fcntl

    with contextlib.suppress(OSError):  # then a large environment goes through in pieces
        fcntl.fcntl(pipe, getattr(fcntl, "F_SETPIPE_SZ", 1031), 1 << 20)


def _size(words: Sequence[str]) -> int:
    return sum(len(os.fsencode(word)) + 1 for word in words)


def _packed(message: dict[str, Any]) -> bytes:
    data = marshal.dumps(message, _MARSHAL)
    return len(data).to_bytes(8, "little") + data


# --- the spare's side ------------------------------------------------------------------------


def wait(program: str, control: int, answer: int, *files: int) -> None:
    """Import what the launcher imports, wait for a task, and become the launcher."""
    for fd in (control, answer, *files):
        os.set_inheritable(fd, False)
    _name(b"saferun-spare")
    module = program == "-m"
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, os.getcwd() if module else os.path.dirname(os.path.realpath(program)))
    __import__(_MODULE)
    code = None if module else _compiled(program)
    task = _task(control)
    if task is None:
        os._exit(1)
    _take_over(task)
    _take_streams(files)
    os.write(answer, b"r")
    if os.read(control, 1) != b"g":
        os._exit(1)
    os.close(control)
    os.close(answer)
    _become(program, code)


def _compiled(program: str) -> Any:
    with open(program, "rb") as file:
        return compile(file.read(), program, "exec", dont_inherit=True)


def _task(control: int) -> Any:
    """Return what comes in on the pipe; None when the keeper has gone without a word."""
    head = _read(control, 8)
    body = _read(control, int.from_bytes(head, "little")) if head else b""
    return marshal.loads(body) if body else None  # noqa: S302 - from our own keeper


def _read(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(fd, count - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _take_over(task: dict[str, Any]) -> None:
    """Have the arguments and the environment that a launcher started now would have."""
    born, env = task["born"], task["env"]
    made = {name: value for name, value in os.environ.items() if born.get(name) != value}
    removed = [name for name in born if name not in os.environ]
    os.environ.clear()
    os.environ.update(env)
    for name in removed:  # by this start, which would have happened now
        os.environ.pop(name, None)
    os.environ.update(made)
    sys.argv[:] = task["argv"]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = task["orig_argv"]
    _show(task["orig_argv"])
    words = task["orig_argv"]
    _name(os.path.basename(os.fsencode(words[0] if task["argv"][0] == "-m" else task["argv"][0])))
    if _INJECT in env and not sys.flags.ignore_environment:
        _start_injection()


def _start_injection() -> None:
    """Do what our sitecustomize does first of all in an agent; a fault of ours stops no job."""
    try:
        package: Any = type(sys)("_saferun_inject")
        package.__path__ = [
            os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(_OURS))), "inject")
        ]
        sys.modules["_saferun_inject"] = package
        from _saferun_inject import bootstrap  # type: ignore[import-not-found]

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
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _become(program: str, code: Any) -> None:
    """Execute the launcher's program as the interpreter would have."""
    main = sys.modules["__main__"]
    for name in [name for name in vars(main) if name not in _KEPT]:
        delattr(main, name)
    _forget_our_frames()
    if code is None:
        import runpy

        parent, _, name = _MODULE.rpartition(".")
        vars(sys.modules[parent]).pop(name, None)  # or runpy warns that it was imported already
        sys.modules.pop(_MODULE, None)
        vars(main).update(__doc__=None, __package__=None, __loader__=None, __spec__=None)
        runpy._run_module_as_main(_MODULE)  # type: ignore[attr-defined]
        return
    from importlib.machinery import SourceFileLoader

    loader = SourceFileLoader("__main__", program)
    facts = {"__file__": program, "__cached__": None, "__doc__": None, "__package__": None}
    vars(main).update(facts, __loader__=loader, __spec__=None)
    exec(code, vars(main))  # noqa: S102 - the launcher's own program


def _forget_our_frames() -> None:
    """Let tracebacks begin where a launcher's would."""
    show, ours = sys.excepthook, ("<string>", _OURS)

    def shown(kind: Any, error: Any, trace: Any) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        sys.excepthook = show
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = shown


def _name(name: bytes) -> None:
    with contextlib.suppress(OSError), open("/proc/self/comm", "wb") as file:
        file.write(name[:15])


def _show(words: list[str]) -> None:
    """Write over our own command line, which ps and pgrep -f read."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    except (OSError, IndexError, ValueError):
        return
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - start - 1]
    if not 0 < start < end:
        return
    # A kernel or a sandbox may forbid it, and wrong numbers hurt nobody: the file refuses them.
    with contextlib.suppress(OSError), open("/proc/self/mem", "r+b", buffering=0) as file:
        file.seek(start)
        file.write(text.ljust(end - start, b"\0"))
