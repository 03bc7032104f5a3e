"""Watch whether the hooks run in the ranks, while these still import torch.

`-I`, `-E`, `-S` and another `sitecustomize` that Python finds first keep saferun's out, silently,
and then nothing holds of what the profile's hooks promise. A rank that has loaded torch is past its
`sitecustomize`; its first collective comes a second or more later. Without hooks the user is told
at once, and with `hooks.required` the attempt ends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from saferun.base import proc
from saferun.base.rank_numbers import ranks_text
from saferun.diagnosis.evidence import Hang
from saferun.inject import contract
from saferun.journal import rank_files
from saferun.supervise import rank_processes
from saferun.supervise.beside import NEVER_S, Beside
from saferun.supervise.watch.running_job import RunningJob
from saferun.system import command

KIND = "hooks-missing"
_EVERY_S = 0.25  # an import of torch takes 1.5 s and more
_LOOKS = 400  # a rank that has not loaded torch by then may never do so
_ASK_S = 3.0
# Prints which sitecustomize this Python has loaded: ours removes its directory from sys.path.
_ASK = (
    "import sys; found = sys.modules.get('sitecustomize'); "
    "print(getattr(found, '__file__', 'none') if sys.argv[1] in sys.path else '')"
)
_NAMES = ("sitecustomize.py", "sitecustomize.pyc", "sitecustomize/__init__.py")


class HooksSeen(Beside):
    """Watch one attempt's ranks until each is known to have its hooks, or not to have them.

    Args:
        job: the attempt. Warm ranks are not watched: they take their hooks from their agent.
    """

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        settings = job.plan.settings
        injected = contract.VARIABLE in job.plan.env and job.receipts is not None
        spawned = settings.launcher == "torchrun" and settings.start.ranks == "spawn"
        self._left = _LOOKS if injected and spawned else 0
        self._suspects: set[int] = set()  # ranks without a receipt at the last look

    def look(self) -> float:
        """Look at the ranks; return the seconds until the next look."""
        if not self._left:
            return NEVER_S
        self._left -= 1
        ranks = rank_processes.ranks(self._job.launcher)
        files = rank_files.of_attempt(self._job.receipts, self._job.number, rank_files.RECEIPTS)
        silent = ranks.keys() - {file.rank for file in files}
        late = {rank: pid for rank in silent if (pid := _with_torch(ranks[rank]))}
        # At the first look a receipt may have been written since the files were listed.
        certain = self._suspects.intersection(late)
        self._suspects = set(late)
        for rank in certain:
            if why := self._reason(late[rank], starts_rank=ranks[rank] == late[rank]):
                self._report(certain, why)
                return NEVER_S
        if silent <= certain and _is_complete(ranks):
            self._left = 0
        return _EVERY_S

    def _reason(self, pid: int, *, starts_rank: bool) -> str:
        """Return why a process that has loaded torch has no hooks; "" if it may have some.

        Args:
            pid: the process.
            starts_rank: torchrun has started this process itself. A Python that a rank's shell runs
                writes no receipt at its start.
        """
        if "python" not in os.path.basename(proc.link(f"/proc/{pid}/exe")):
            return ""
        if rank_processes.is_isolated(pid):
            return "their Python was started with -I, -E or -S, which skip it"
        env = proc.environ(pid)
        site = self._job.plan.env["PYTHONPATH"].value.partition(os.pathsep)[0]
        folders = env.get("PYTHONPATH", "").split(os.pathsep)
        if other := _before(folders, site):
            return f"{other} is loaded in its place"
        if site not in folders:
            return "PYTHONPATH has lost saferun's directory"
        other = _loaded(pid, env, site) if starts_rank else ""
        return other and f"{other} is loaded in its place"

    def _report(self, ranks: set[int], why: str) -> None:
        self.told_of_hooks, self._left = True, 0
        line = f"saferun's sitecustomize does not run in {ranks_text(ranks)}: {why}"
        if self._job.plan.settings.hooks.required:
            self.cause = Hang(KIND, min(ranks), line, "the ranks' start")
        else:
            self._job.say(
                f"{line}; the profile's hooks do not hold there "
                "(`hooks.required: true` would end the attempt)"
            )


def _is_complete(ranks: Mapping[int, int]) -> bool:
    """Return whether torchrun has started all ranks of this machine."""
    size = next((proc.environ(pid).get("LOCAL_WORLD_SIZE") for pid in ranks.values()), "")
    return size == str(len(ranks))


def _with_torch(pid: int) -> int:
    """Return the process that has loaded torch, a rank's or the one that its wrapper runs; or 0."""
    while "libtorch" not in proc.text(f"/proc/{pid}/maps"):
        children = proc.text(f"/proc/{pid}/task/{pid}/children").split()
        if len(children) != 1:
            return 0
        pid = int(children[0])
    return pid


def _before(folders: Sequence[str], site: str) -> str:
    """Return the sitecustomize in PYTHONPATH that stands before ours; "" if there is none."""
    before = folders[: folders.index(site)] if site in folders else folders
    paths = (os.path.join(folder, name) for folder in before if folder for name in _NAMES)
    return next(filter(os.path.isfile, paths), "")


def _loaded(pid: int, env: Mapping[str, str], site: str) -> str:
    """Return which other sitecustomize a process's Python loads, as it says; "" if ours."""
    python = proc.text(f"/proc/{pid}/cmdline").partition("\0")[0]
    if not os.path.isabs(python):
        return ""
    # Without the contract's variable ours does nothing but load the next one.
    environ = {name: value for name, value in env.items() if name != contract.VARIABLE}
    return command.run((python, "-c", _ASK, site), environ, _ASK_S).out.strip()
