"""What `import saferun` offers Python programs: run a job, diagnose a log, show a plan.

A run is a saferun process of its own: the caller keeps its signal handlers and its main thread.
Nothing here prints; the run itself writes what saferun writes.
"""

from __future__ import annotations

import io
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, TypeAlias, cast

from saferun.diagnosis import signatures
from saferun.diagnosis.deciding import classify
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import Evidence
from saferun.diagnosis.foreign import log_file, long_log
from saferun.errors import SaferunError, UsageError
from saferun.journal import reader
from saferun.journal.attempts import RecordedAttempt, attempts
from saferun.model import LaunchPlan
from saferun.planning import inputs
from saferun.planning.inputs import RunInputs
from saferun.planning.request import read
from saferun.profile.values import write_value
from saferun.settings import Value
from saferun.supervise.start import check_script

if TYPE_CHECKING:  # only type checkers have it
    from typing_extensions import Buffer

Setting: TypeAlias = Value | Sequence[str] | Sequence[float]
Words: TypeAlias = Sequence[str | os.PathLike[str]]
Stream: TypeAlias = int | IO[str] | IO[bytes] | None

# The first argument is the pid of the calling process: when that process is gone, the run ends as
# if by SIGTERM. The second is the directory in which saferun is found. The working directory is
# removed from the path, so that no file there is imported in place of a module. No signal stays
# blocked: a worker of Ray blocks SIGINT, and a job that inherits that cannot be interrupted.
_SCRIPT = """
import sys
sys.path[:] = [*filter(None, sys.path), sys.argv.pop(2)]
import ctypes, os, signal
signal.pthread_sigmask(signal.SIG_SETMASK, ())
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(143)
from saferun.__main__ import main
sys.exit(main())
"""
_LINE_CHARACTERS = 1 << 16  # a longer line comes in parts


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a run."""

    number: int  # counted from 1
    worker: int | None  # number of the worker (`workers: N`); None if there is only one job
    status: int | None  # exit status of the launcher, 128+n for a signal; None: not known
    started_at: float | None  # seconds since the epoch
    lived_s: float | None
    mitigations: tuple[str, ...]  # mitigations in force
    diagnosis: Diagnosis | None  # None after a success, or if no diagnosis was recorded
    action: str  # next action: "again", "stop", "done"; "" if unknown
    reason: str  # reason for `action`


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, from its exit status and its journal.

    Only the status is known if there is no journal (`retries=0`, SAFERUN_DISABLE, a disk that
    cannot be written, a run that was refused before its first attempt).
    """

    status: int  # exit status of saferun, 128+n if a signal ended it; 0 is success
    run_id: str  # as in `saferun runs show`; "" without a journal
    outcome: str  # "ok", "failed", "interrupted"
    attempts: tuple[Attempt, ...]  # in order; the attempts of one worker stand together
    journal: str | None  # directory

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Return the diagnosis of the last failed attempt; None after a success."""
        found = [one.diagnosis for one in self.attempts if one.diagnosis]
        return found[-1] if found and self.status else None

    @property
    def mitigations(self) -> tuple[str, ...]:
        """Return the mitigations that were in force in the last attempt."""
        return self.attempts[-1].mitigations if self.attempts else ()


class RunError(SaferunError):
    """A run with `check=True` did not succeed.

    Attributes:
        result: how the run ended.
    """

    def __init__(self, result: RunResult) -> None:
        found = result.diagnosis
        what = f"the run ended with status {result.status}"
        super().__init__(
            f"{what}: {found.kind}" if found else what,
            where=found.root_line if found else "",
            fix=found.advice if found else "",
        )
        self.code = result.status
        self.result = result

    def __reduce__(self) -> tuple[type[RunError], tuple[RunResult]]:
        return RunError, (self.result,)


def run(
    argv: Words,
    *,
    check: bool = False,
    on_line: Callable[[str], object] | None = None,
    stdout: Stream = None,
    stderr: Stream = None,
    profile: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Setting] | None = None,
    retries: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> RunResult:
    """Run a job under saferun, in a process of its own, and return how it ended.

    An exception in this process ends the run, and this function waits for that end.
    KeyboardInterrupt acts as Ctrl-C (a second one kills the job); any other exception, and the
    death of this process, act as SIGTERM.

    Args:
        argv: the arguments after `saferun`: `["--nproc-per-node", "2", "train.py", "--lr",
            "3e-4"]`.
        check: raise RunError if the status is not 0.
        on_line: function that gets each output line (saferun's lines too) without its newline.
        stdout: where the job's output goes, as for subprocess, but no pipe; by default inherited.
        stderr: the same for the job's stderr and saferun's lines. Standard input is empty.
        profile: name or file, as `--profile`.
        settings: profile keys and their values, as `--set`: `{"retry.attempts": 1, "env.A": "b"}`.
        retries: attempts after the first, as `--retries`.
        run_dir: the directory of the runs' journals, as `--run-dir`.
        env: the whole environment of the run; otherwise that of this process.
        cwd: its working directory; otherwise that of this process.

    Raises:
        UsageError: the command line is wrong, or the script does not exist.
        ProfileError: the profile or a setting is wrong.
        UnavailableError: there is no torchrun, or no python.
        RunError: with `check`, the job failed.
    """
    if subprocess.PIPE in (stdout, stderr) or (on_line and not stdout is stderr is None):
        fix = "give on_line alone, or files"
        raise UsageError("stdout and stderr take neither a pipe nor on_line", fix=fix)
    line = _command_line(argv, profile, settings, retries, run_dir)
    gathered, cwd = _gather(line, env, cwd, starting=True)
    streams = (subprocess.PIPE, subprocess.STDOUT) if on_line else (stdout, stderr)
    before = _names(gathered.runs)
    with _start(line, gathered, cwd, streams) as job:
        status = _wait(job, on_line)
    result = _result(job.pid, status, gathered, before)
    if check and status:
        raise RunError(result)
    return result


def plan(
    argv: Words,
    *,
    profile: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Setting] | None = None,
    retries: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> LaunchPlan:
    """Return what `run` would start, as `saferun plan` shows it; nothing is started.

    Neither the script nor torchrun nor the GPU need exist.

    Args:
        argv: the arguments after `saferun`.
        profile: name or file, as `--profile`.
        settings: profile keys and their values, as `--set`: `{"retry.attempts": 1, "env.A": "b"}`.
        retries: attempts after the first, as `--retries`.
        run_dir: the directory of the runs' journals, as `--run-dir`.
        env: the whole environment of the run; otherwise that of this process.
        cwd: its working directory; otherwise that of this process.

    Raises:
        UsageError: the command line is wrong.
        ProfileError: the profile or a setting is wrong.
    """
    line = _command_line(argv, profile, settings, retries, run_dir)
    return _gather(line, env, cwd, starting=False)[0].plan()


def diagnose(log: str | os.PathLike[str], *, exit_code: int | None = None) -> Diagnosis:
    """Return what failed, from a log.

    Args:
        log: the text of a log, or the path of a file (`pathlib.Path("train.log")`).
        exit_code: exit status of the program that wrote the log; negative or 128+n for a signal;
            None if unknown.

    Raises:
        UsageError: `log` is a str that names a file; a path must be a `pathlib.Path`.
        FileNotFoundError: there is no such file (a LogNotFoundError, which is a SaferunError).
        LogError: the file cannot be read.
        TypeError: `log` is bytes.
    """
    if isinstance(log, (bytes, bytearray)):
        raise TypeError("log is a str, or the path of a file, and not bytes")
    if not isinstance(log, str):
        lines = log_file.read(os.path.abspath(log))
    elif len(log) < 4096 and log.isprintable() and os.path.isfile(log):
        raise UsageError("a str is the text of a log", fix=f"for the file, Path({log!r})")
    else:
        lines = long_log.read([log.encode("utf-8", "surrogateescape")])
    return classify.classify(Evidence(log=lines, exit_code=exit_code), signatures.load())


def _gather(
    line: list[str],
    env: Mapping[str, str] | None,
    asked: str | os.PathLike[str] | None,
    *,
    starting: bool,
) -> tuple[RunInputs, str]:
    """Return the inputs of a command line's plans, and the working directory."""
    environ = dict(os.environ if env is None else env)
    cwd = inputs.working_directory()
    cwd = os.path.join(cwd, os.fspath(asked)) if asked else cwd
    gathered = inputs.gather(read(line, environ), environ, cwd, starting=starting)
    inputs.check_accepted(gathered)
    return gathered, cwd


def _command_line(
    argv: Words,
    profile: str | os.PathLike[str] | None,
    settings: Mapping[str, Setting] | None,
    retries: int | None,
    run_dir: str | os.PathLike[str] | None,
) -> list[str]:
    """Return the command line, with the keyword arguments as options."""
    if isinstance(argv, str):
        raise TypeError("argv is a list of words, and not one str")
    options = [("--profile", profile), ("--retries", None if retries is None else str(retries))]
    options += [("--run-dir", run_dir)]
    for key, value in (settings or {}).items():
        one = cast("Value", tuple(value) if isinstance(value, list) else value)
        options.append(("--set", f"{key}={write_value(key, one)}"))
    line = [f"{name}={os.fspath(text)}" for name, text in options if text is not None]
    return line + [os.fspath(word) for word in argv]


def _start(
    line: list[str], gathered: RunInputs, cwd: str, streams: tuple[Stream, Stream]
) -> subprocess.Popen[bytes]:
    """Start saferun in a new session, so that Ctrl-C reaches it only through this process.

    Args:
        line: saferun's command line.
        gathered: the run's inputs, which have the environment.
        cwd: saferun's working directory.
        streams: where its stdout and its stderr go.
    """
    if gathered.profile is not None:
        check_script(gathered, cwd)
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return subprocess.Popen(  # noqa: S603 - the caller's own words, and no shell
        [sys.executable, "-c", _SCRIPT, str(os.getpid()), package, "run", *line],
        stdin=subprocess.DEVNULL,
        stdout=streams[0],
        stderr=streams[1],
        env=gathered.environ,
        cwd=cwd,
        start_new_session=True,
    )


class _Pipe(io.FileIO):
    """A pipe that is read in short waits: another thread's interrupt does not end a read(2)."""

    def readinto(self, buffer: Buffer, /) -> int | None:
        ready = select.poll()
        ready.register(self, select.POLLIN)
        while not ready.poll(100):
            pass
        return super().readinto(buffer)


def _wait(job: subprocess.Popen[bytes], on_line: Callable[[str], object] | None) -> int:
    """Wait for a run and return its exit status; an exception first ends the run, then rises."""
    raised: BaseException | None = None
    lines = None
    if job.stdout:
        pipe = io.BufferedReader(_Pipe(job.stdout.fileno(), closefd=False))
        lines = io.TextIOWrapper(pipe, encoding="utf-8", errors="replace")
    while True:
        try:
            while lines and (line := lines.readline(_LINE_CHARACTERS)):
                if on_line:
                    on_line(line.removesuffix("\n"))
            while (status := job.poll()) is None:
                time.sleep(0.1)  # as _Pipe does
            break
        except BaseException as error:
            raised = raised or error
            interrupt = isinstance(error, KeyboardInterrupt)
            if not interrupt:
                on_line = None
            job.send_signal(signal.SIGINT if interrupt else signal.SIGTERM)
    if raised is not None:
        raise raised
    return 128 - status if status < 0 else status


def _result(pid: int, status: int, gathered: RunInputs, before: set[str]) -> RunResult:
    """Return how a run ended.

    Args:
        pid: saferun's pid, which is part of the name of the run's directory.
        status: exit status.
        gathered: the run's inputs, which say where the journals are.
        before: names of the run directories that existed before the run.
    """
    outcome = reader.FAILED if status else reader.OK
    made = re.compile(rf"\d{{8}}-\d{{6}}-{pid}(-\w+)?\Z")
    for name in sorted(filter(made.match, _names(gathered.runs) - before)):
        found = reader.read(gathered.runs, name, time.time())
        if found is not None and found.process.get("host", _host()) == _host():
            known = signatures.load()
            tried = tuple(_attempt(one, known) for one in attempts(found))
            if found.outcome in reader.FINISHED:
                outcome = found.outcome
            return RunResult(status, found.id, outcome, tried, found.path)
    return RunResult(status, "", outcome, (), None)


def _attempt(one: RecordedAttempt, known: signatures.Knowledge) -> Attempt:
    end = one.outcome
    return Attempt(
        number=one.number,
        worker=one.worker,
        status=end.exit_code,
        started_at=one.started_at,
        lived_s=one.lived_s,
        mitigations=one.begun.mitigations,
        diagnosis=classify.recorded(end.diagnosis, known),
        action=end.decision.action,
        reason=end.decision.reason,
    )


def _names(base: str) -> set[str]:
    try:
        return set(os.listdir(base)) if base else set()
    except OSError:
        return set()


def _host() -> str:
    return os.uname().nodename
