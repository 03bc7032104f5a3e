"""Watch a running attempt for a hang: look at it now and then, and say where its ranks are.

It looks at /proc alone (work_signs.py). Only where a silence is too long are the ranks asked, by a
signal, for their stacks, which faulthandler writes to a file of each (inject/hooks/excepthook.py),
and py-spy for those of C++ beside them, where it is installed (native_stacks.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.diagnosis.evidence import Hang
    from saferun.diagnosis.silence import Look, Place, Silence
    from saferun.model import WatchPolicy
    from saferun.supervise.native_stacks import NativeStacks
    from saferun.supervise.record import Record

_EVERY_S = 15.0  # between looks
_ANSWER_S = 2.0  # for the ranks to write their stacks
_AGAIN_S = 0.5  # between looks for py-spy's answers
_STACK_BYTES = 256 * 1024  # of each that are read

Say = Callable[[str], None]


class HangWatch:
    """One attempt, watched.

    Args:
        policy: the `watch` section.
        receipts: the directory of the ranks' receipts; None where there is none.
        record: the run's journal.
        say: takes lines for people.
        environ: of the user.
    """

    def __init__(
        self,
        policy: WatchPolicy,
        receipts: str | None,
        record: Record,
        say: Say,
        environ: Mapping[str, str],
    ) -> None:
        from saferun.diagnosis.silence import Silence

        self._receipts, self._record, self._say = receipts, record, say
        self._environ = environ
        self._silence: Silence = Silence(policy.silence_s)
        self._every_s = min(_EVERY_S, (policy.silence_s or _EVERY_S * 4) / 4)
        self._launcher = 0
        self._asked: tuple[Look, dict[int, tuple[str, int]], NativeStacks] | None = None
        self._ends = policy.mode == "end"
        self._is_wanted = False  # a person asked where the ranks are
        self.cause: Hang | None = None  # why the attempt was ended

    def started(self, launcher: int) -> None:
        """Note which command runs."""
        self._launcher = launcher

    def ask(self) -> None:
        """Have the next look followed by a report, however busy the job is."""
        self._is_wanted = True

    def look(self) -> float | None:
        """Look at the job; return the seconds until the next look, None to end it. Never raises."""
        try:
            return self._look()
        except Exception as error:
            self._record.fault(error)
            return self._every_s

    def _look(self) -> float | None:
        from saferun.supervise import work_signs

        now = work_signs.look(self._launcher, time.monotonic())
        if now is None:
            return self._every_s
        if self._asked is not None:
            since, files, native = self._asked
            if not native.are_ready(now.at_s):
                return _AGAIN_S
            self._asked = None
            self._report(since, now, {pid: _tail(*f) for pid, f in files.items()}, native.take())
            return self._every_s if self.cause is None else None
        began = self._silence.take(now, self._every_s)
        if self._is_wanted:
            began = now
        if began is None:
            return self._every_s
        from saferun.supervise.native_stacks import NativeStacks

        pids = [one.pid for one in now.ranks]
        self._asked = began, self._ask_ranks(now), NativeStacks(pids, self._environ, now.at_s)
        return _ANSWER_S

    def _ask_ranks(self, now: Look) -> dict[int, tuple[str, int]]:
        """Ask the ranks for their stacks; return the file of each, and its size before.

        A rank without the handler would die of the signal, so it is left alone.
        """
        from saferun.inject import contract
        from saferun.keeper import process_tree

        files: dict[int, tuple[str, int]] = {}
        names = os.listdir(self._receipts) if self._receipts else []
        for one in now.ranks:
            ending = f"-pid{one.pid}{contract.STACKS}"
            for name in (name for name in names if name.endswith(ending)):
                path = os.path.join(self._receipts or "", name)
                if process_tree.catches(one.pid, contract.STACKS_SIGNAL):
                    files[one.pid] = path, os.path.getsize(path)
                    os.kill(one.pid, contract.STACKS_SIGNAL)
        return files

    def _report(
        self, since: Look, now: Look, stacks: dict[int, str], native: dict[int, str]
    ) -> None:
        from saferun.diagnosis import silence
        from saferun.diagnosis.failure_report import seconds

        written = {pid: stack for pid, stack in stacks.items() if stack}
        by_py_spy = {pid: silence.from_py_spy(text) for pid, text in native.items()}
        found: list[Place] = silence.places(since, now, {**by_py_spy, **written})
        wanted, self._is_wanted = self._is_wanted, False
        silent = "" if wanted else seconds(now.at_s - since.at_s)
        self._say("\n".join(silence.report(found, silent)))
        if self._ends and not wanted:
            self.cause = silence.cause(found)
        if path := self._record.hang(found, round(now.at_s - since.at_s, 1), native):
            self._say(f"  all stacks, those of C++ too: {path}")


def _tail(path: str, before: int) -> str:
    """Return what was added to a file."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            file.seek(before)
            return file.read(_STACK_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
