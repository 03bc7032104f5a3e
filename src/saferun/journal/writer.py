"""What a run leaves on disk, in `<base>/<run>/`; a convenience that never stops or slows a job.

    plan.json           the first attempt's plan
    events.jsonl        one JSON object a line: {"at": unix s, "s": s since begin, "event": name, …}
    attempt-N.stdout    the tails of an attempt's streams; an empty one leaves no file
    attempt-N.stderr
    receipts/           what ranks say of themselves (written by them)

All of it is masked (system/redact.py), 0700 or 0600, and written through the descriptor of a
directory that this run made: a planted link or a directory swapped underneath gets nothing. One
process writes; there is no lock.

The disk may be full, read-only, gone, or a network file system whose server is dead: one line says
so for the whole run, and each later write tries again. What touches the disk runs in a thread of
its own that is waited for a bounded time, since no call of a dead NFS mount can be interrupted.
"""

from __future__ import annotations

import _thread
import errno
import os
import signal
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any

from saferun.system import paths
from saferun.system.redact import Masker
from saferun.system.secret_names import is_secret

BEGIN_S, WRITE_S, SYNC_S = 5.0, 2.0, 2.0  # the most that the run waits for the disk, each time
NAMES = 1000  # directories tried for one run id
READ_PIECES = 64  # MiB of an events.jsonl that are read
_HEAD = ("at", "s", "event")  # of every line; no fact replaces them
_DEPTH = 12  # of facts in facts; what lies deeper is written as text
_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Journal:
    """The record of one run. Made by `begin`; no method raises for the disk's sake.

    Attributes:
        path: the run's directory, absolute; None where nothing can be written.
    """

    def __init__(
        self,
        masker: Masker,
        say: Callable[[str], None],
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.path: str | None = None
        self._mask, self._say, self._now, self._clock = masker, say, now, clock
        self._began = clock()
        self._directory = self._events = -1
        self._torn = False  # the last line has no end: the next one begins with a newline
        self._lost = 0  # events that the disk did not take
        self._planned = self._said = False
        self._disk, self._syncing = _Bounded(), _Bounded()

    @classmethod
    def begin(
        cls,
        base: str,
        run: str,
        masker: Masker,
        *,
        say: Callable[[str], None],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> Journal:
        """Make the run's directory, `<base>/<run>` or where that exists `<base>/<run>-2`, ….

        Args:
            base: where runs keep their journals; made with its parents, 0700, where it is missing.
                It may be a link of the user's own or of root's, and anybody's directory.
            run: the run's id.
            masker: keeps secrets from the disk.
            say: writes one line for people; called at most once for the whole run.
            now: seconds since the epoch.
            clock: seconds that never jump.
        """
        journal = cls(masker, say, now, clock)
        problem = journal._disk.do(lambda: journal._make(base, _file_name(run)), BEGIN_S)
        if problem:
            journal._complain(journal.path or base, problem)
        return journal

    def plan(self, document: Mapping[str, Any]) -> None:
        """Write plan.json, once: what a later attempt has for a plan is an event.

        Args:
            document: `page.as_json(plan)`; the values in `env` are masked by their names too.
        """
        import json

        clean = {key: self._clean(value) for key, value in document.items() if key != "env"}
        clean["env"] = self._environment(document.get("env", {}))
        if self._planned:
            self.event("plan", plan=clean)
            return
        content = json.dumps({key: clean[key] for key in document}, indent=2).encode() + b"\n"
        self._planned = self._try("plan.json", lambda: self._put("plan.json", content))

    def event(self, name: str, /, **facts: Any) -> None:
        """Append one line to events.jsonl. Text in `facts` is masked, command lines word by word.

        What JSON does not know is written as its `repr`. Where earlier events were lost, `lost`
        says how many.
        """
        import json

        head = {"at": round(self._now(), 3), "s": round(self._clock() - self._began, 3)}
        lost = {"lost": self._lost} if self._lost else {}
        clean = {key: self._clean(fact) for key, fact in facts.items() if key not in _HEAD}
        line = json.dumps({**head, "event": name, **lost, **clean}).encode() + b"\n"
        written = self._try("events.jsonl", lambda: self._append(line))
        self._lost = 0 if written else self._lost + 1

    def tails(self, attempt: int, out: bytes, err: bytes) -> None:
        """Keep the ends of an attempt's two streams, masked; an empty one leaves no file."""
        for name, data in (("stdout", out), ("stderr", err)):
            if data and self.path:
                file, content = f"attempt-{attempt}.{name}", self._mask.data(data)
                self._try(file, _later(self._put, file, content))

    def sync(self) -> None:
        """Bring what was written to the disk; returns after 2 s whether it is there or not.

        A disk that is busy with a checkpoint takes longer at times: that is no fault, nothing is
        said of it, and events go on meanwhile.
        """
        if self.path:
            problem = self._syncing.do(self._flush, SYNC_S)
            if problem and problem.errno != errno.ETIMEDOUT:
                self._complain(self.path, problem)

    def receipts(self) -> str | None:
        """Return the directory for the ranks' receipts; None where there is none any more."""
        if self.path is None or self._disk.do(self._check_receipts, WRITE_S):
            return None
        return os.path.join(self.path, "receipts")

    def took_receipts(self) -> bool:
        """Return whether the disk will have taken what ranks wrote: it took all else."""
        return not self._said and self.receipts() is not None

    def close(self) -> None:
        """End the journal; what comes after it is dropped."""
        self.path = None
        if not self._disk.busy():  # else a thread still uses the descriptors
            for descriptor in (self._events, self._directory):
                self._disk.do(_later(_close, descriptor), WRITE_S)
            self._events = self._directory = -1

    def discard(self) -> None:
        """Remove the directory of a run that never began."""
        path = self.path
        self.close()
        if path is not None:
            self._disk.do(lambda: _remove_empty(path), WRITE_S)

    # What people are told

    def _try(self, name: str, work: Callable[[], None]) -> bool:
        """Do what touches the disk; say so the first time that it fails."""
        if self.path is None:
            return False
        problem = self._disk.do(work, WRITE_S)
        if problem:
            self._complain(os.path.join(self.path, name), problem)
        return problem is None

    def _complain(self, where: str, problem: OSError) -> None:
        if self._said:
            return
        self._said = True
        lost = "parts of this run's journal may be missing" if self.path else "no journal is kept"
        why = problem.strerror or str(problem)
        self._say(f"cannot write {where}: {why}; {lost}, the job goes on")

    # What is kept of secrets: nothing

    def _clean(self, value: Any, depth: int = 0) -> Any:
        """Return a value as JSON knows it, its text masked."""
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, str):
            return self._mask.text(value)
        if isinstance(value, float) and abs(value) < float("inf"):
            return value
        if isinstance(value, Mapping) and depth < _DEPTH:
            return {self._mask.text(str(k)): self._fact(k, v, depth) for k, v in value.items()}
        if isinstance(value, (list, tuple)) and depth < _DEPTH:
            if value and all(isinstance(word, str) for word in value):
                return self._mask.words(value)
            return [self._clean(item, depth + 1) for item in value]
        return self._mask.text(repr(value))

    def _fact(self, name: object, value: Any, depth: int) -> Any:
        if isinstance(value, str) and is_secret(str(name)):
            return self._mask.setting(str(name), value)
        return self._clean(value, depth + 1)

    def _environment(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Mask {NAME: {"value": …, "origin": …}} by the variables' names."""
        clean = {}
        for name, setting in settings.items():
            clean[name] = self._clean(setting)
            if isinstance(setting, Mapping) and "value" in setting:
                clean[name]["value"] = self._mask.setting(name, str(setting["value"]))
        return clean

    # What touches the disk; raises OSError, in a thread

    def _make(self, base: str, run: str) -> None:
        base = os.path.abspath(base)
        parent = _open_base(base)
        try:
            name = _new_directory(parent, run)
            self._directory = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
            owners = (os.geteuid(), os.fstat(parent).st_uid)  # the latter: squashed, fixed owners
            if os.fstat(self._directory).st_uid not in owners:
                raise OSError(errno.EPERM, "somebody else's directory was put in its place")
        finally:
            os.close(parent)
        self.path = os.path.join(base, name)
        os.mkdir("receipts", 0o700, dir_fd=self._directory)
        self._open_events()

    def _open_events(self) -> None:
        self._events = os.open("events.jsonl", _FILE | os.O_APPEND, 0o600, dir_fd=self._directory)
        status = os.fstat(self._events)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            _close(self._events)
            self._events = -1
            raise OSError(errno.EEXIST, "something else was put in its place")

    def _append(self, line: bytes) -> None:
        """Append a line whole, or nothing of it."""
        if self._events >= 0 and os.fstat(self._events).st_nlink == 0:  # deleted by somebody
            _close(self._events)
            self._events = -1
        if self._events < 0:
            self._open_events()
        size = os.fstat(self._events).st_size
        try:
            _write(self._events, b"\n" * self._torn + line)
            self._torn = False
        except OSError:
            self._take_back(size)
            raise

    def _take_back(self, size: int) -> None:
        """Cut off the part of a line that was written."""
        try:
            os.ftruncate(self._events, size)
        except OSError:
            self._torn = True

    def _put(self, name: str, content: bytes) -> None:
        """Write a file in one step; what was planted under its name is replaced, not followed."""
        temporary = f".{name}.tmp"
        descriptor = self._new(temporary)
        try:
            try:
                _write(descriptor, content)
            finally:
                os.close(descriptor)  # a network file system may report here
            os.rename(temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError:
            self._unlink(temporary)
            raise

    def _unlink(self, name: str) -> None:
        try:
            os.unlink(name, dir_fd=self._directory)
        except OSError:
            return  # what matters is why it could not be written

    def _new(self, name: str) -> int:
        try:
            return os.open(name, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)
        except FileExistsError:
            self._unlink(name)
            return os.open(name, _FILE | os.O_EXCL, 0o600, dir_fd=self._directory)

    def _flush(self) -> None:
        for descriptor in (self._events, self._directory):
            if descriptor >= 0:
                own = os.dup(descriptor)  # `close` may come while this hangs
                try:
                    os.fsync(own)
                finally:
                    os.close(own)

    def _check_receipts(self) -> None:
        """Fail unless the path leads to the directory that this run made, and not by a link."""
        ours = os.stat("receipts", dir_fd=self._directory, follow_symlinks=False)
        by_path = os.lstat(os.path.join(self.path or "", "receipts"))
        if not stat.S_ISDIR(ours.st_mode) or not os.path.samestat(ours, by_path):
            raise OSError(errno.ESTALE, "another directory was put in its place")


class _Bounded:
    """Does one thing at a time in a thread, and waits for it only so long."""

    def __init__(self) -> None:
        self._unfinished: _thread.LockType | None = None

    def busy(self) -> bool:
        """Say whether something that was given up is still being done."""
        if self._unfinished is not None and not self._unfinished.acquire(False):
            return True
        self._unfinished = None
        return False

    def do(self, work: Callable[[], None], limit_s: float) -> OSError | None:
        """Return None where the work was done, else why not (ETIMEDOUT: it hangs)."""
        if self.busy():
            return OSError(errno.ETIMEDOUT, "the disk does not answer")
        problems: list[OSError] = []
        done = self._unfinished = _thread.allocate_lock()
        done.acquire()
        _start(work, problems, done)
        if not done.acquire(timeout=limit_s):
            return OSError(errno.ETIMEDOUT, "the disk does not answer")
        self._unfinished = None
        return problems[0] if problems else None


def _start(work: Callable[[], None], problems: list[OSError], done: _thread.LockType) -> None:
    """Start a thread that takes no signal: those are for the thread that waits for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
    try:
        _thread.start_new_thread(_run, (work, problems, done))
    except RuntimeError:  # no thread is to be had: better unbounded than not at all
        _run(work, problems, done)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(work: Callable[[], None], problems: list[OSError], done: _thread.LockType) -> None:
    try:
        work()
    except OSError as error:
        problems.append(error)
    except Exception as error:  # a fault of ours; the job is worth more than its record
        problems.append(OSError(errno.EIO, f"{type(error).__name__}: {error}"))
    finally:
        done.release()


def _later(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: function(*arguments)


def _file_name(run: str) -> str:
    name = run.replace("/", "_").replace("\0", "_")
    return name if name.strip(".") else "run"


def _open_base(base: str) -> int:
    """Open the directory of all runs; make it where it is missing.

    Raises:
        OSError: it cannot be made or opened, or it is a link that somebody else has planted.
    """
    paths.make(base)
    status = os.lstat(base)
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        raise OSError(errno.ELOOP, "it is somebody else's symbolic link")
    return os.open(base, _DIRECTORY)


def _new_directory(parent: int, run: str) -> str:
    """Make a directory that nobody had before and return its name: two runs never share one."""
    for number in range(1, NAMES + 1):
        name = run if number == 1 else f"{run}-{number}"
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            continue
        return name
    raise OSError(errno.EEXIST, f"{NAMES} runs have this name")


def _write(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _remove_empty(path: str) -> None:
    """Remove a run's directory in which no attempt has left anything."""
    for name in os.listdir(path):
        entry = os.path.join(path, name)
        if os.path.isdir(entry) and not os.path.islink(entry):
            os.rmdir(entry)
        else:
            os.unlink(entry)
    os.rmdir(path)


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


def read_events(path: str) -> list[dict[str, Any]]:
    """Return the events of an events.jsonl, whatever was cut off or mixed in.

    Lines that are no event are passed over; of a line that was cut and grown over by another, the
    other one is read. A file that cannot be read, or is none, has no events.
    """
    try:
        content = _read(path)
    except (OSError, ValueError):
        return []
    events = (_event(line) for line in content.split(b"\n") if line)
    return [event for event in events if event is not None]


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return b""
        pieces: list[bytes] = []
        while (piece := os.read(descriptor, 1 << 20)) and len(pieces) < READ_PIECES:
            pieces.append(piece)
        return b"".join(pieces)
    finally:
        os.close(descriptor)


def _event(line: bytes) -> dict[str, Any] | None:
    import json

    for start in (0, line.rfind(b'{"at":')):
        try:
            found = json.loads(line[max(0, start) :])
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict) and isinstance(found.get("event"), str):
            return found
    return None
