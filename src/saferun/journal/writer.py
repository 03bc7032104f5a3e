"""Write a run's files to `<base>/<run>/`, optionally: this never stops or slows a job.

    plan.json           the first attempt's plan
    events.jsonl        one JSON object a line: {"at": unix s, "s": s since begin, "event": name, …}
    attempt-N.stdout    the tails of an attempt's streams; an empty one leaves no file
    attempt-N.stderr
    attempt-N.steps     its steps over time (training_steps.py)
    receipts/           the ranks' reports about themselves (which they write)
    alive               time of the run's last sign of life
    state/              files of plain python processes for those that replace them
    run.lock            held while the run lives (run_directory.py)
    worker-K/           the same for one of several workers, whose events have "worker": K

Everything is masked (system/redact.py), and has mode 0700 or 0600. One process writes it all,
except for the receipts, which are masked when the attempt has ended (rank_files.py). Each worker's
supervisor writes its own directory and appends complete lines to the events.

The disk may be full, read-only, gone, or a network file system whose server is dead. One line
reports that for the whole run, and each later write tries again (disk.py limits the time).
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from saferun.journal.disk import BoundedDisk
from saferun.journal.event_types import NAMES, EventFacts, PlanChanged, as_line
from saferun.journal.run_directory import STEPS_FILE, RunDirectory, remove_empty
from saferun.system.redact import Masker
from saferun.system.secret_names import is_secret

BEGIN_S, WRITE_S, SYNC_S = 5.0, 2.0, 2.0  # longest waits for the disk, each time


class Journal:
    """The record of one run, created by `begin`. No method raises because of the disk.

    Attributes:
        path: the run's directory, absolute; None if nothing can be written.
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
        self._files: RunDirectory | None = None
        self._worker: int | None = None
        self._lost = 0  # number of events that the disk did not take
        self._hangs = 0  # number of hangs with stored stacks
        self._planned = self._complained = False
        self._disk, self._syncing = BoundedDisk(), BoundedDisk()

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
        """Create the run's directory: `<base>/<run>`, or, if that exists, `<base>/<run>-2`, ….

        Args:
            base: the directory of all journals; created with its parents, 0700, if it is missing.
                It may be a link of the user or of root, and anybody's directory.
            run: the run's id.
            masker: removes secrets before anything is written.
            say: function that writes one line for people; called at most once for the whole run.
            now: function that returns seconds since the epoch.
            clock: function that returns seconds that never jump.
        """
        journal = cls(masker, say, now, clock)
        problem = journal._disk.do(lambda: journal._make(base, run), BEGIN_S)
        if problem:
            journal._complain(journal.path or base, problem)
        return journal

    def for_worker(self, number: int, say: Callable[[str], None]) -> Journal:
        """Return the journal of one of several workers; call it in the worker's own process.

        Args:
            number: the worker's number.
            say: function that writes one line for people; called at most once.
        """
        journal = Journal(self._mask, say, self._now, self._clock)
        journal._began, journal._worker = self._began, number
        if self.path is not None:
            problem = journal._disk.do(lambda: journal._make_part(self._directory()), BEGIN_S)
            if problem:
                journal._complain(self.path, problem)
        return journal

    def share(self) -> None:
        """Prepare for workers' journals; call it before their processes begin."""
        if self.path is not None:
            self._directory().share()

    @property
    def run_path(self) -> str | None:
        """Return the run's directory, even for a worker's journal."""
        return os.path.dirname(self.path) if self.path and self._worker is not None else self.path

    @property
    def is_whole(self) -> bool:
        """Return whether this journal is a run's, not one worker's."""
        return self._worker is None

    def plan(self, document: Mapping[str, Any]) -> None:
        """Write plan.json, once; the plan of a later attempt becomes an event.

        Args:
            document: the result of `plan.view.as_json(plan)`; values in `env` are also masked by
                their names.
        """
        clean = {key: self._clean(value) for key, value in document.items() if key != "env"}
        clean["env"] = self._environment(document.get("env", {}))
        if self._planned:
            self.event(PlanChanged(clean))
            return
        content = json.dumps({key: clean[key] for key in document}, indent=2).encode() + b"\n"
        self._planned = self._put("plan.json", content)

    def event(self, facts: EventFacts, worker: int | None = None) -> None:
        """Append one line to events.jsonl. Text in `facts` is masked, command lines word by word.

        A value that JSON cannot represent is written as its `repr`. If earlier events were lost,
        `lost` has their number. `worker` is the worker concerned, if there are several; a worker's
        journal uses its own.
        """
        head = {"at": round(self._now(), 3), "s": round(self._clock() - self._began, 3)}
        name, worker = NAMES[type(facts)], self._worker if worker is None else worker
        of = {"lost": self._lost} if self._lost else {}
        of |= {} if worker is None else {"worker": worker}
        clean = {name: self._clean(fact) for name, fact in as_line(facts).items()}
        line = json.dumps({**head, "event": name, **of, **clean}).encode() + b"\n"
        written = self._try("events.jsonl", lambda: self._directory().append(line))
        self._lost = 0 if written else self._lost + 1

    def tails(self, attempt: int, out: bytes, err: bytes) -> None:
        """Store the ends of an attempt's two streams, masked; an empty one leaves no file.

        Args:
            attempt: the attempt's number, from 1.
            out: the end of stdout.
            err: the end of stderr.
        """
        for name, data in (("stdout", out), ("stderr", err)):
            if data and self.path:
                self._put(f"attempt-{attempt}.{name}", self._mask.data(data))

    def steps(self, attempt: int, text: str) -> None:
        """Store an attempt's steps so far; this replaces what was stored before.

        Args:
            attempt: the attempt's number, from 1.
            text: the result of training_steps.as_text.
        """
        self._put(STEPS_FILE.format(attempt), text.encode())

    def stacks(self, text: str) -> str | None:
        """Store the stacks of a hanging job's ranks, masked.

        Args:
            text: py-spy's output.

        Returns:
            The file's name in the run's directory; None if it could not be written.
        """
        self._hangs += 1
        file = f"hang-{self._hangs}.txt"
        return file if self._put(file, self._mask.data(text.encode("utf-8", "replace"))) else None

    def masked(self, text: str) -> str:
        """Return a text without secrets."""
        return self._mask.text(text)

    def masked_data(self, data: bytes) -> bytes:
        """Return bytes without secrets."""
        return self._mask.data(data)

    def alive(self) -> None:
        """Note that the run lives; each event does so, too."""
        self._try("alive", lambda: self._directory().mark())

    def sync(self) -> None:
        """Flush everything to disk; returns after 2 s even if that is not finished.

        A disk that is busy with a checkpoint may take longer: that is no error and is not reported,
        and events are still written.
        """
        if self.path:
            problem = self._syncing.do(self._directory().flush, SYNC_S)
            if problem and problem.errno != errno.ETIMEDOUT:
                self._complain(self.path, problem)

    def receipts(self) -> str | None:
        """Return the directory for the ranks' receipts; None if it is gone."""
        return self._part("receipts", self._directory().check_receipts) if self.path else None

    def state(self) -> str | None:
        """Create the directory that the run's processes share, 0700; None if that fails."""
        return self._part("state", self._directory().make_state) if self.path else None

    def flight(self) -> str | None:
        """Create the directory for torch's flight records; None if that fails."""
        return self._part("flight", self._directory().make_flight) if self.path else None

    def _part(self, name: str, prepare: Callable[[], None]) -> str | None:
        found: list[str] = []

        def work() -> None:
            prepare()
            found.append(self._directory().part(name))

        return None if self._disk.do(work, WRITE_S) else found[0]

    def took_receipts(self) -> bool:
        """Return whether the disk will have taken the ranks' files: it took everything else."""
        return not self._complained and self.receipts() is not None

    def close(self) -> None:
        """End the journal; later events are dropped."""
        self.path = None
        if self._files and not self._disk.busy():  # otherwise a thread still uses the descriptors
            self._disk.do(self._files.close, WRITE_S)
            self._files = None

    def discard(self) -> None:
        """Remove the directory of a run that never began."""
        path = self.path
        self.close()
        if path is not None:
            self._disk.do(lambda: remove_empty(path), WRITE_S)

    def _make(self, base: str, run: str) -> None:
        files = self._files = RunDirectory.make(base, run)
        self.path = files.path
        files.prepare()

    def _make_part(self, whole: RunDirectory) -> None:
        assert self._worker is not None, "a worker's journal has its number"
        self._files = whole.for_worker(self._worker)
        self.path = self._files.path

    def _directory(self) -> RunDirectory:
        assert self._files is not None, "a journal with a path has a directory"
        return self._files

    # What users are told

    def _try(self, name: str, work: Callable[[], None]) -> bool:
        """Do work on the disk; report its first failure."""
        if self.path is None:
            return False
        problem = self._disk.do(work, WRITE_S)
        if problem:
            self._complain(os.path.join(self.path, name), problem)
        return problem is None

    def _put(self, name: str, content: bytes) -> bool:
        return self._try(name, lambda: self._directory().put(name, content))

    def _complain(self, where: str, problem: OSError) -> None:
        if self._complained:
            return
        self._complained = True
        lost = "parts of this run's journal may be missing" if self.path else "no journal is kept"
        why = problem.strerror or str(problem)
        self._say(f"cannot write {where}: {why}; {lost}, the job goes on")

    # Masking

    def _clean(self, value: Any) -> Any:
        """Return a value for JSON, with its text masked."""
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float) and abs(value) < float("inf"):
            return value
        if isinstance(value, Mapping):
            return {self._mask.text(str(k)): self._fact(str(k), v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            if value and all(isinstance(word, str) for word in value):
                return self._mask.argv(value)
            return [self._clean(item) for item in value]
        return self._mask.text(value if isinstance(value, str) else repr(value))

    def _fact(self, name: str, value: Any) -> Any:
        if isinstance(value, str) and is_secret(name):
            return self._mask.setting(name, value)
        return self._clean(value)

    def _environment(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Mask {NAME: {"value": …, "origin": …}} by the variables' names."""
        clean = {}
        for name, setting in settings.items():
            clean[name] = self._clean(setting)
            if isinstance(setting, Mapping) and "value" in setting:
                clean[name]["value"] = self._mask.setting(name, str(setting["value"]))
        return clean
