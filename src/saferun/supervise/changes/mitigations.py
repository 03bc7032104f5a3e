"""The mitigations of one run: those in force, those that may be tried, those that helped before.

It connects the loop with planning/mitigation_catalog.py (what a mitigation changes), probes.py
(what the machine offers it) and journal/mitigation_history.py (what helped before).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from saferun.diagnosis.attempt_outcome import AttemptOutcome
from saferun.errors import own_fault
from saferun.journal import mitigation_history
from saferun.journal.mitigation_history import Entry, Key
from saferun.journal.receipts import Receipt, missed, nccl
from saferun.model import LaunchOptions, LaunchPlan
from saferun.planning import mitigation_catalog, mitigation_overlay
from saferun.planning.inputs import RunInputs
from saferun.profile.schema import in_range
from saferun.system.gpus import driver_version
from saferun.system.redact import Masker
from saferun.system.stderr import say

if TYPE_CHECKING:  # a launch does without dataclasses, sockets, tempfile
    from saferun.diagnosis.nccl_tests import NcclTests
    from saferun.supervise.changes.probes import Probes

NCCL_TESTS = "nccl-diagnostics"


class RunMitigations:
    """The changes for this run's attempts.

    Args:
        gathered: the inputs of plans.
        first: the plan of attempt 1 without mitigations.
        directory: the run's directory, where caches may be made; "" if there is none.
    """

    def __init__(self, gathered: RunInputs, first: LaunchPlan, directory: str) -> None:
        self.in_force: tuple[str, ...] = ()
        self._base = (gathered.identity, gathered.profile), first
        self._environ = gathered.environ
        self._directory = directory
        self._prefix = gathered.launcher.prefix if gathered.launcher else None
        self._known: Mapping[str, mitigation_catalog.Mitigation] | None = None
        self._probes: Probes | None = None
        self._chosen: dict[str, str] = {}  # mitigation -> kind of the failure that it is for
        self._recalled: dict[str, Entry] = {}
        self._graphs_seen = False  # a rank compiled with CUDA graphs
        self._hooks_run = True  # False: the ranks skipped the hooks
        self.nccl_finding = ""  # NCCL's finding, as a clause for people
        self._nccl_answered = False  # NCCL has tested its paths in this run
        self._nccl = ""  # NCCL's version in the ranks; "" if unknown
        self.beside: tuple[str, ...] = ()  # extra mitigations of the next attempt, for diagnosis
        self._missed: frozenset[str] = frozenset()  # modules that ranks loaded without their hooks

    # --- what is changed ---

    def plan(self, gathered: RunInputs) -> LaunchPlan:
        """Return the plan of an attempt with the mitigations in force."""
        base, names = self._plain(gathered), (*self.in_force, *self.beside)
        if not names:
            return base
        here = self._situation(gathered, base, names)
        made = mitigation_overlay.changes(self.known(), names, here)
        return gathered.plan(made._replace(names=self.in_force))

    def _plain(self, gathered: RunInputs) -> LaunchPlan:
        """Return the plan of an attempt without mitigations, computed once for each."""
        computed_from = gathered.identity, gathered.profile  # other nodes may change the profile
        if self._base[0] != computed_from:
            self._base = computed_from, gathered.plan()
        return self._base[1]

    def usable(self, gathered: RunInputs, name: str, in_force: Sequence[str]) -> bool:
        """Return whether a mitigation can be tried in the next attempt.

        Args:
            gathered: the inputs of that attempt's plan.
            name: the mitigation's name.
            in_force: mitigations that the attempt already has.
        """
        here = self._situation(gathered, self._plain(gathered), (*in_force, name))
        return not mitigation_overlay.refusal(self.known(), name, in_force, here)

    def add(self, name: str, kind: str) -> None:
        """Put a mitigation for a failure of this kind in force."""
        self.in_force += (name,)
        self._chosen[name] = kind

    def have_nccl_tested(
        self, gathered: RunInputs, last: AttemptOutcome, tests: NcclTests | None
    ) -> None:
        """Let NCCL test its paths in the next attempt, if NCCL or a peer failed.

        NCCL's answer holds for the rest of the run. All ranks must be on this machine and have the
        same variable: otherwise NCCL would wait forever.

        Args:
            gathered: the inputs of the next attempt's plan.
            last: the attempt that failed.
            tests: NCCL's findings in that attempt.
        """
        if tests is not None:
            self._nccl_answered |= tests.completed
            self.nccl_finding = f"{tests.finding} (attempt {last.number})" if tests.finding else ""
        self.beside = ()
        policy = self._base[1].settings.mitigate
        group = last.diagnosis.group
        if self._nccl_answered or group != "collective" or not (self._nccl and policy.enabled):
            return
        tested, base = self.known()[NCCL_TESTS], self._plain(gathered)
        here = self._situation(gathered, base, ())
        given = any(here.value(name) is not None for name in tested.env)
        if NCCL_TESTS in policy.never or given or base.options.nodes != 1:
            return
        self.beside = (NCCL_TESTS,) if in_range(self._nccl, tested.nccl) else ()

    def read_receipts(self, receipts: Sequence[Receipt], *, ranks_seen: bool) -> None:
        """Read the ranks' receipts for facts that decide whether a mitigation can be used.

        A mitigation in force is dropped if its hook was bypassed in a rank.

        Args:
            receipts: the receipts of one attempt.
            ranks_seen: ranks ran, so missing receipts mean that the hooks did not run.
        """
        self._nccl, _ = nccl(receipts)
        self._graphs_seen |= mitigation_overlay.graphs_seen(receipt.facts for receipt in receipts)
        if ranks_seen:
            self._hooks_run = any(receipt.rank is not None for receipt in receipts)

        if past := missed(receipts):
            self._missed |= past.keys()
            self._drop_what_did_not_hold()

    def _drop_what_did_not_hold(self) -> None:
        """Drop the mitigations whose hooks were bypassed: they were not tried."""
        self.in_force = tuple(
            name for name in self.in_force if not self._missed & self.known()[name].targets
        )

    def describe(self, names: Sequence[str]) -> str:
        """Return what mitigations set and their cost, for people."""
        return mitigation_catalog.describe(self.known(), names)

    def known(self) -> Mapping[str, mitigation_catalog.Mitigation]:
        """Return all mitigations by name."""
        if self._known is None:
            self._known = mitigation_catalog.load()
        return self._known

    def close(self) -> None:
        """Remove the files that were made only for this run."""
        if self._probes is not None:
            self._probes.close()

    def _situation(
        self, gathered: RunInputs, base: LaunchPlan, names: Sequence[str]
    ) -> mitigation_overlay.Situation:
        if self._probes is None:
            from saferun.supervise.changes.probes import Probes  # sockets: few runs need them

            self._probes = Probes(self._environ, self._prefix, self._directory)
        here = mitigation_overlay.Situation(
            base,
            self._environ,
            gathered.facts.torch,
            graphs_seen=self._graphs_seen,
            hooks_run=self._hooks_run,
        )
        answers = self._probes.ask(
            mitigation_overlay.questions(self.known(), names),
            gathered.identity.attempt,
            host=mitigation_overlay.meeting_host(here),
            nodes=base.options.nodes or 0,
        )
        return here._replace(answers=answers, missed=self._missed)

    # --- the history ---

    def put_in_force(self, gathered: RunInputs, say: Callable[[str], None]) -> None:
        """Put in force what helped this script here before; report this, or a failure to do so."""
        try:
            if line := self.recall(gathered):
                say(line)
        except Exception as error:
            say(own_fault("the history of mitigations could not be read", error))

    def recall(self, gathered: RunInputs) -> str:
        """Put in force what helped this script here before; return a message about it, or ""."""
        policy = self._base[1].settings.mitigate
        if not (policy.enabled and policy.remember):
            return ""
        if not os.path.exists(mitigation_history.path(self._environ)):
            return ""
        found = mitigation_history.recall(
            mitigation_history.load(self._environ),
            self._key(gathered),
            self._arguments(gathered),
            time.time(),
        )
        for entry in found:
            name = entry.mitigation
            if name not in policy.never and self.usable(gathered, name, self.in_force):
                self.in_force += (name,)
                self._recalled[name] = entry
        return self._recall_message()

    def learn(self, gathered: RunInputs, plan: LaunchPlan) -> None:
        """Add the mitigations of this successful run to the history."""
        lasting = [n for n in self._chosen if n in self.in_force and self.known()[n].lasting]
        if not lasting or not plan.settings.mitigate.remember:
            return
        key, now = self._key(gathered), time.time()
        arguments = self._arguments(gathered)
        new = [
            mitigation_history.Entry(
                key, name, self._chosen[name], arguments if self.known()[name].costs else None, now
            )
            for name in lasting
        ]
        try:
            mitigation_history.keep(self._environ, new)
        except OSError as error:
            why = error.strerror or str(error)
            where = mitigation_history.path(self._environ)
            say(f"the mitigation that helped is not kept for the next run: {where}: {why}")

    def _arguments(self, gathered: RunInputs) -> tuple[str, ...]:
        """Return the script's arguments as they are stored and compared: without secrets."""
        arguments = gathered.request.line.script_args
        return tuple(Masker(self._environ, arguments).argv(arguments))

    def _recall_message(self) -> str:
        if not self._recalled:
            return ""
        entries = [
            f"{name} (it helped against {entry.kind} on "
            f"{time.strftime('%Y-%m-%d', time.localtime(entry.at))})"
            for name, entry in self._recalled.items()
        ]
        return (
            f"from the history: {', '.join(entries)}; `saferun runs mitigations clear` forgets it"
        )

    def _key(self, gathered: RunInputs) -> Key:
        line = gathered.request.line
        return Key(
            script=_script(line.script or "", gathered.request.options),
            gpu=", ".join(sorted({gpu.name for gpu in gathered.facts.gpu.gpus})),
            torch=gathered.facts.torch or "",
            driver=driver_version(),
        )


def _script(script: str, options: LaunchOptions) -> str:
    """Return the name under which a script is stored; code (-c) itself is not stored."""
    if options.code:
        return f"-c {crc32(script.encode(errors='surrogateescape')):08x}"
    return f"-m {script}" if options.module else os.path.realpath(script)
