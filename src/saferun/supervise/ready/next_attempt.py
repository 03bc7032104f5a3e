"""What makes the next attempt ready: a process that has imported ahead what its first one needs.

Five seconds after an attempt's start, the keeper of the next one begins a warm process, for which
warm_start.py says what it must have. With `start.ranks: warm` the ranks are forked from it, so the
running attempt has one, too; a plain python process that replaces another is warm from the second
one on, as soon as the imports of the first are known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from saferun.model import LaunchPlan
from saferun.planning.inputs import RunInputs
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.beside import LOAD_S, NEVER_S, PREPARE_S, Beside
from saferun.supervise.ready import warm_start
from saferun.supervise.ready.keeper_pool import KeeperPool
from saferun.supervise.ready.rank_imports import RankImports


class NextAttempt(Beside):
    """The warm processes of one run.

    Args:
        gathered: the run's inputs.
        first: the plan of attempt 1.
        keepers: holds the keeper of the next attempt.
        following: function that returns the plan and the environment of the attempt after this one.
        say: function that takes lines for people.
    """

    def __init__(
        self,
        gathered: RunInputs,
        first: LaunchPlan,
        keepers: KeeperPool,
        following: Callable[[], tuple[LaunchPlan, Mapping[str, str]]],
        say: Callable[[str], None],
    ) -> None:
        self._launcher, self._keepers, self._say = gathered.launcher, keepers, say
        self._following = following
        self._is_warm = first.settings.start.ranks == "warm"
        # A plain python process that replaces another should be warm.
        self.replaces = self._is_warm and gathered.launcher is None
        self._imports = RankImports(first, gathered) if self._is_warm else None
        self._cold: set[str] = set()  # reasons why replacing processes were not warm
        self._stays_cold = False
        self._number, self._began_s = 1, 0.0  # of the running attempt

    def begins(self, number: int, plan: LaunchPlan, env: Mapping[str, str]) -> None:
        """Have a process import for an attempt that begins now, if its ranks are forked from it."""
        self._number, self._began_s = number, time.monotonic()
        if self._is_warm and not self.replaces and (why := self._warmed(plan, env)):
            self._say(f"start.ranks is warm, but ranks are started as usual: {why}")

    def prepare(self, plan: LaunchPlan, env: Mapping[str, str]) -> None:
        """Have a process import for an attempt that is likely to come."""
        if not self._stays_cold and (why := self._warmed(plan, env)):
            self.was_cold(why)

    def look(self) -> float:
        """Prepare the next attempt once the imports of this one are known."""
        if self._imports is None or self._imports.known(self._number):
            self.prepare(*self._following())
            return NEVER_S
        # A process of a search may live only seconds.
        is_soon = self.replaces and time.monotonic() < self._began_s + PREPARE_S
        return LOAD_S if is_soon else PREPARE_S

    def was_cold(self, why: str) -> None:
        """Report why a replacing process was not warm; if the reason recurs, none is prepared."""
        if self.replaces:
            self._stays_cold = why in self._cold
            if not self._stays_cold:
                self._cold.add(why)
                self._say(f"start.ranks is warm, but a process is started as usual: {why}")

    def ended(self, ended: AttemptEnd) -> None:
        """Keep what the attempt's ranks have imported."""
        if self._imports:
            self._imports.take(self._number)

    def _warmed(self, plan: LaunchPlan, env: Mapping[str, str]) -> str:
        """Let a process import ahead; return why there is none, "" if there is one."""
        listed = self._imports.path if self._imports else None
        warm = warm_start.offered(self._launcher, plan, env, listed)
        starts = "torchrun's own Python" if self._launcher else "python"
        return self._keepers.prepare_warm(warm) if warm else f"{starts} does not start them"
