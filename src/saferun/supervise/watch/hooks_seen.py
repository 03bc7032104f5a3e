"""Watch whether the hooks run in the ranks, while these still import torch.

`-I`, `-E`, `-S` and another `sitecustomize` that Python finds first keep saferun's out, silently,
and then nothing holds of what the profile's hooks promise. A process that has loaded torch is past
its `sitecustomize`; its first collective comes a second or more later. Without hooks the user is
told at once, and with `hooks.required` the attempt ends; without it the other ranks learn from a
file for whom they need not wait.

The process is the rank itself, or the one that the rank's wrapper runs: a shell, or a Python that
has hooks, writes the receipt of the rank, and starts the script its own way. A job of plain python
may have such wrappers, too. What a warm agent forks has its agent's hooks, and shows no RANK in
/proc: only ranks that were spawned are seen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence

from saferun.base import files, proc
from saferun.base.rank_numbers import ranks_text
from saferun.diagnosis.evidence import Hang
from saferun.inject import bootstrap, contract
from saferun.journal import rank_files
from saferun.supervise import rank_processes
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.beside import NEVER_S, Beside
from saferun.supervise.watch.running_job import RunningJob
from saferun.system import command

KIND = "hooks-missing"
_EVERY_S = 0.25  # an import of torch takes 1.5 s and more
_LOOKS = 400  # what has not loaded torch by then may never do so
_ASK_S = 3.0
_LIBRARIES = ("libtorch", "libtensorflow")
# Prints which sitecustomize this Python has loaded: ours removes its directory from sys.path.
_ASK = (
    "import sys; found = sys.modules.get('sitecustomize'); "
    "print(getattr(found, '__file__', 'none') if sys.argv[1] in sys.path else '')"
)
_NAMES = ("sitecustomize.py", "sitecustomize.pyc", "sitecustomize/__init__.py")


class HooksSeen(Beside):
    """Watch one attempt's job until each rank is known to have its hooks, or not to have them.

    Args:
        job: the attempt.
    """

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        injected = contract.VARIABLE in job.plan.env and job.receipts is not None
        self._left = _LOOKS if injected else 0
        self._site = job.plan.env["PYTHONPATH"].value.partition(os.pathsep)[0] if injected else ""
        self._is_plain = job.plan.settings.launcher == "python"
        self._required = job.plan.settings.hooks.required
        self._seen: set[int] = set()  # processes that have loaded torch and have been judged
        self._without: dict[int, str] = {}  # why a rank has none
        self._answers: dict[tuple[str, str], str] = {}

    def look(self) -> float:
        """Look at the processes; return the seconds until the next look."""
        if not self._left:
            return NEVER_S
        self._left -= 1
        launcher = self._job.launcher
        starts = {0: launcher} if self._is_plain else rank_processes.ranks(launcher)
        loaded = {rank: pid for rank, start in starts.items() if (pid := _with_torch(start))}
        # Listed after that: who has loaded torch has written its receipt.
        files = rank_files.of_attempt(self._job.receipts, self._job.number, rank_files.RECEIPTS)
        written = {file.pid for file in files}
        for rank, pid in loaded.items():
            if pid not in self._seen and (why := self._reason(pid, starts[rank], written)):
                self._without[rank] = why
        self._seen.update(loaded.values())
        settled = (
            rank in self._without or loaded.get(rank) in {start, *written}
            for rank, start in starts.items()
        )
        if all(settled) and (self._is_plain or _is_complete(starts)):
            self._left = 0
        # Ranks load torch one after the other: one line names all, and none may meet another.
        if self._without and (self._required or not self._left):
            self._report()
        return _EVERY_S

    def ended(self, ended: AttemptEnd) -> None:
        """Say what is known by then."""
        if self._without and not self.told_of_hooks:
            self._report()

    def _reason(self, pid: int, start: int, written: set[int]) -> str:
        """Return why a process that has loaded torch has no hooks; "" if it may have some.

        Args:
            pid: the process.
            start: the process of its rank, or of plain python, that was started for it.
            written: the processes that have written a receipt.
        """
        if "python" not in os.path.basename(proc.link(f"/proc/{pid}/exe")):
            return ""
        if pid != start and (self._is_plain or start in written) and _is_helper(pid, start):
            return ""
        env = proc.environ(pid)
        folders = env.get("PYTHONPATH", "").split(os.pathsep)
        other = _before(folders, self._site)
        # A process with a receipt has hooks, unless its program was replaced by another.
        if pid in written and not (other and self._site in folders):
            return ""
        if rank_processes.is_isolated(pid):
            return "their Python was started with -I, -E or -S, which skip it"
        if self._site in folders and (other or (pid == start and not self._is_plain)):
            other = self._loaded(pid, env)  # the other one may import ours
        if other:
            return f"{other} is loaded in its place"
        return "" if self._site in folders else "PYTHONPATH has lost saferun's directory"

    def _loaded(self, pid: int, env: Mapping[str, str]) -> str:
        """Return which other sitecustomize a process's Python loads, as it says; "" if ours."""
        python = (proc.command(pid) or [""])[0]
        if "/" in python:
            python = os.path.join(f"/proc/{pid}/cwd", python)
        found = shutil.which(python, path=env.get("PATH"))
        key = str(found), env.get("PYTHONPATH", "")
        if found and key not in self._answers:
            # Without the contract's variable ours does nothing but load the next one.
            environ = {name: value for name, value in env.items() if name != contract.VARIABLE}
            answer = command.run((found, "-c", _ASK, self._site), environ, _ASK_S)
            self._answers[key] = answer.out.strip()
        return self._answers.get(key, "")

    def _report(self) -> None:
        self.told_of_hooks, self._left = True, 0
        ranks, why = set(self._without), next(iter(self._without.values()))
        where = "the job's Python" if self._is_plain else ranks_text(ranks)
        line = f"saferun's sitecustomize does not run in {where}: {why}"
        if self._required:
            rank = None if self._is_plain else min(ranks)
            self.cause = Hang(KIND, rank, line, "the ranks' start")
        else:
            path = f"{self._job.receipts}/{contract.WITHOUT_HOOKS.format(self._job.number)}"
            with contextlib.suppress(OSError):  # a full disk: the others wait for them
                files.write_new(path, " ".join(map(str, ranks)).encode())
            self._job.say(
                f"{line}; the profile's hooks do not hold there "
                "(`hooks.required: true` would end the attempt)"
            )


def _is_complete(ranks: Mapping[int, int]) -> bool:
    """Return whether torchrun has started all ranks of this machine."""
    size = next((proc.environ(pid).get("LOCAL_WORLD_SIZE") for pid in ranks.values()), "")
    return size == str(len(ranks))


def _with_torch(pid: int) -> int:
    """Return the process that has loaded torch: this one, or the only one below it; or 0."""
    maps = proc.text(f"/proc/{pid}/maps")
    if any(library in maps for library in _LIBRARIES):
        return pid
    children = proc.text(f"/proc/{pid}/task/{pid}/children").split()
    found = set(map(_with_torch, map(int, children))) - {0}
    return found.pop() if len(found) == 1 else 0


def _is_helper(pid: int, start: int) -> bool:
    """Return whether a process may be no more than a helper of one that has hooks.

    It is the job if it is what that one runs, the words at its end being the same, or if it runs a
    file and that one has started it: an installer, say, has started others with a `sitecustomize`
    of its own.
    """
    argv, stat = proc.command(pid), proc.stat(pid)
    if argv[-1:] == proc.command(start)[-1:]:
        return False
    return bootstrap.program(argv)[0] == "-c" or stat is None or int(stat[1]) != start


def _before(folders: Sequence[str], site: str) -> str:
    """Return the sitecustomize in PYTHONPATH that stands before ours; "" if there is none."""
    before = folders[: folders.index(site)] if site in folders else folders
    paths = (os.path.join(folder, name) for folder in before if folder for name in _NAMES)
    return next(filter(os.path.isfile, paths), "")
