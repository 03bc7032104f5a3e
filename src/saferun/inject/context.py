"""The context of the hooks of one process: their settings, their receipts, their messages.

Receipts stay in memory until the process is *active*: it has joined a process group or compiled
something. A DataLoader worker or a helper that only imports torch writes no receipt.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

from ..base import files
from . import contract, rank, receipts
from .targets import TARGETS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn, TypeVar

    from saferun.settings import HookSettings

    Result = TypeVar("Result")

    Entry = tuple[float, str, str, dict[str, object]]  # Unix seconds, hook, outcome, its facts

_ERROR_CHARS = 200  # characters of an error's first line in the report of a failed hook
_PENDING_LIMIT = 1000  # most receipts kept by a process that never becomes active


class Context:
    """A process's settings and reports for all of its hooks; the first hook creates it.

    Args:
        text: the value of SAFERUN_INJECT.
        hook_late: function that hooks watched modules that were imported without the finder; never
            raises.
    """

    def __init__(
        self, text: str, hook_late: Callable[[Context], None] = lambda context: None
    ) -> None:
        self._hook_late = hook_late
        found = contract.decode(text)
        self.hooks = _hook_settings(found["hooks"])
        self.mitigations = found["mitigations"]
        self.attempt = found["attempt"]
        self.start = found["start"]  # checkpoint to resume from, and how; None: the script decides
        self._directory = found["receipts"]
        self.state = found["state"]  # a directory that this run's processes share; or None
        self.previous = found["previous"]  # exit status of the previous attempt; None: not failed
        self.is_watched = bool(found["watch"])  # a watch may ask for the stacks
        self._lists_imports = bool(found["imports"])  # for the imports of the next start
        self._listed_by = 0  # pid of the process that wrote the list; its forks have none
        self._reported: set[str] = set()
        self._pid = os.getpid()
        self._active = False
        self._pending: list[Entry] = []
        self._targets = dict.fromkeys(TARGETS, contract.NOT_IMPORTED)

    def receipt(self, hook: str, outcome: str, **facts: object) -> None:
        """Append one line to this process's receipt. Never raises: a full disk stops no job.

        Args:
            hook: the hook's name.
            outcome: one of the contract's outcomes: APPLIED, OBSERVED, ….
            facts: the hook's own facts; a value that JSON cannot represent is written as its
                `repr`.
        """
        try:
            self._notice_fork()
            self._pending.append((receipts.now(), hook, outcome, facts))
            if self._active or rank.group_is_initialised():
                self.activate()
            del self._pending[_PENDING_LIMIT:]
        except Exception:
            self._pending = []

    def write_file(self, ending: str, content: bytes) -> None:
        """Write a file of this process beside its receipt. Raises OSError on failure."""
        path = self._path_beside(ending)
        if path is not None:
            files.write_new(path, content)

    def recycle(self, why: str, *, kind: str = "", progress: int) -> bool:
        """Ask the loop to replace this process when it ends with contract.RECYCLE_STATUS.

        Args:
            why: the reason, in one line for people.
            kind: kind of the failure that makes the process unusable; "" for none.
            progress: number of pieces of work that this process has completed, such as trials.

        Returns:
            Whether the request was written. If not, the process must continue.
        """
        import json

        content = json.dumps({"why": why, "kind": kind, "progress": progress}).encode()
        try:
            self.write_file(contract.RECYCLE, content)
        except OSError:
            return False
        return self._directory is not None

    def hook_late_imports(self) -> None:
        """Hook watched modules that were imported without the finder. Never raises."""
        self._hook_late(self)

    def set_target(self, name: str, state: str) -> None:
        """Set the state of a watched module: contract.APPLIED, NOT_IMPORTED or MISSED."""
        if self._targets.get(name) != state:
            self._targets[name] = state
            if self._active:
                self.receipt(contract.TARGETS, contract.OBSERVED, targets={name: state})

    def ranks_without_hooks(self) -> list[int]:
        """Return the ranks of this node in which the supervisor has seen that no hooks run."""
        path = f"{self._directory or os.devnull}/{contract.WITHOUT_HOOKS.format(self.attempt)}"
        return [int(rank) for rank in files.read(path, 1 << 20).split()]

    def open_file(self, ending: str) -> int | None:
        """Create a file of this process beside its receipt; return its descriptor, or None.

        Raises:
            OSError: the file cannot be created.
        """
        path = self._path_beside(ending)
        return None if path is None else files.open_to_append(path)

    def activate(self) -> None:
        """Declare that this process is a rank or compiles; its receipts are written from now on."""
        try:
            self._notice_fork()
            if not self._active:
                self.hook_late_imports()
                facts: dict[str, object] = {"targets": dict(self._targets)}
                first = (receipts.now(), contract.TARGETS, contract.OBSERVED, facts)
                self._pending.insert(0, first)
                self.list_imports()
            self._active = True
            waiting, self._pending = self._pending, []
            if waiting and self._directory:
                receipts.append(self._directory, self._file_name(), self._lines(waiting))
        except Exception:
            self._pending = []

    def list_imports(self, *, again: bool = False) -> None:
        """Write the list of this process's imports for the next start, if it is asked for.

        Args:
            again: add the new imports to a list that this process has already written.
        """
        if self._lists_imports and self._listed_by == (os.getpid() if again else 0):
            self._listed_by = os.getpid()
            from . import imported_modules

            imported_modules.write(self.open_file)

    def say(self, text: str) -> None:
        """Write one `saferun:` line on stderr."""
        say(text)

    def failed(self, hook: str, error: Exception) -> None:
        """Report that a hook failed; with `hooks.required` this ends the process with status 70."""
        text = str(error).strip().partition("\n")[0][:_ERROR_CHARS]
        what = f"{type(error).__name__}: {text}"
        self.receipt(hook, contract.FAILED, error=what)
        message = f"inject: hook {hook}: {what}; "
        if not self.hooks.required:
            if message not in self._reported:
                self._reported.add(message)
                say(message + "the job goes on without it")
            return
        self.activate()
        say(
            message + "it is required (hooks.required), so this process ends; "
            "set hooks.required to false to go on without it"
        )
        leave(70)

    def guard(self, hook: str, step: Callable[..., Result], *args: Any) -> Result | None:
        """Run a step of a hook; an exception in it becomes one line, and the job continues.

        Args:
            hook: the hook's name, for that line.
            step: the function to call.
            args: the function's arguments.

        Returns:
            The function's result; None if it failed.
        """
        try:
            return step(*args)
        except Exception as error:
            self.failed(hook, error)
            return None

    def _notice_fork(self) -> None:
        # A forked child is a separate process: it is not active, and its parent writes the pending
        # receipts.
        if os.getpid() != self._pid:
            self._pid, self._active, self._pending = os.getpid(), False, []

    def _file_name(self) -> str:
        return receipts.file_name(self.attempt, self._pid)

    def _path_beside(self, ending: str) -> str | None:
        """Return the path of a file beside the receipt, in an existing directory; or None."""
        if not self._directory:
            return None
        files.make_directory(self._directory)
        return os.path.join(self._directory, self._file_name()[: -len(".jsonl")] + ending)

    def _lines(self, entries: list[Entry]) -> list[str]:
        import json

        head = {"v": contract.VERSION, "pid": self._pid, "rank": rank.number()}
        return [
            json.dumps({**facts, "at": at, "hook": hook, "outcome": outcome, **head}, default=repr)
            for at, hook, outcome, facts in entries
        ]


def _hook_settings(section: dict[str, Any]) -> HookSettings:
    """Return the complete, checked section `hooks`, with its keys as attributes.

    The keys are declared in settings.py, which no rank loads; mypy reads them there.
    """
    found: Any = SimpleNamespace(**section)
    for name, value in section.items():
        if isinstance(value, dict):
            setattr(found, name, SimpleNamespace(**value))
    settings: HookSettings = found
    return settings


def say(text: str) -> None:
    """Write one `saferun:` line to stderr in a single write, so that ranks' lines do not mix."""
    try:
        sys.stderr.write("saferun: " + " ".join(text.splitlines()) + "\n")
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # but not exceptions of the job's signal handler
        pass


def leave(status: int) -> NoReturn:
    """End this process, in the only way that no code of the job can catch."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os._exit(status)
