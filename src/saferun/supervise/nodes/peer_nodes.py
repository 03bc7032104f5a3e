"""The other nodes of a run: each has its own saferun, and all run this same code.

Before an attempt the agents meet in their store (inject/node/node_agent.py): each brings the
attempt's number, the mitigations in force and its report of the attempt before. All get one
agreement. A node whose own decision is to stop attends that meeting, too, so that all learn why;
its agent leaves before a rank is started. A node that never met the others (a wrong endpoint)
decides alone.

Runs on one node never use this module.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

from saferun.base import files
from saferun.base.durations import seconds
from saferun.diagnosis import signatures
from saferun.diagnosis.attempt_outcome import FAILED, AttemptOutcome, Decision
from saferun.diagnosis.deciding.retry_policy import AGAIN, STOP
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.errors import EXIT_CONFIG
from saferun.inject.node import node_agent, node_agreement
from saferun.inject.node.node_agreement import AgreedStart, Agreement, Alone, NodeReport
from saferun.journal.event_types import NodesMet
from saferun.model import LaunchPlan, as_tree
from saferun.planning.inputs import RunInputs
from saferun.supervise.attempt_end import AttemptEnd
from saferun.supervise.changes.resumption import Resumption
from saferun.supervise.nodes import node_facts
from saferun.supervise.nodes.nodes import Agreed, Nodes, Telling
from saferun.supervise.one_attempt import Attempt
from saferun.supervise.records.notifier import cleaned
from saferun.supervise.records.record import Record
from saferun.system import disk_room

TEXT_CHARS = 4000  # the longest line of output that the other nodes get
AGENTS = 3  # so many agents in a row may end before their nodes meet
_ROOM_BYTES = 1 << 20  # more than all that an agent writes
REGROUPS = 20  # so many meetings in a row, of nodes that come and go, may start nothing
# What a node tells the others of an AttemptOutcome, beside the diagnosis.
_SHARED = ("kind", "offered", "fingerprint", "root_rank", "waits", "lived_s")


class PeerNodes(Nodes):
    """The other nodes of a run, as this node knows them over all attempts.

    Args:
        gathered: the run.
        resumption: the checkpoints from which this node alone would resume.
        record: the journal.
        say: function that takes lines for people.
    """

    def __init__(
        self,
        gathered: RunInputs,
        resumption: Resumption,
        record: Record,
        say: Callable[[str], None],
    ) -> None:
        self._gathered, self._record, self._resumption = gathered, record, resumption
        self._say = say
        self._temporary: str | None = None  # replaces a run directory that cannot be written to
        self._facts = node_facts.of_run(gathered)
        self._report: NodeReport | None = None  # on the last attempt here, for the meeting
        self._comes_back = False  # the nodes have met, and an attempt has failed since
        self._lost: list[str] = []  # the nodes that went silent in the last attempt
        self._own = Decision(AGAIN, "")  # what this node alone would do after it
        self._holder = ""  # the host of the rendezvous' store
        self._agents_lost = 0  # successive agents that ended before a meeting
        self._since: float | None = None  # start of the wait for others, on the monotonic clock
        self._hosts: dict[str, str] = {}  # hosts at the last meeting, by node rank
        self._regroups = 0
        self._outcome: node_agreement.MeetingOutcome | None = None  # what the last meeting decided
        self._node = 0  # the rank of this one in the last meeting
        self._keys: tuple[dict[str, Any], list[str]] | None = None  # agreed for the run
        self._evidence = 0  # attempts with ranks, known to those who decided on the last start
        self._number = 1  # the number of the next attempt
        self._host = os.uname().nodename  # where the last failure began
        self._diagnosis: Diagnosis | None = None  # of the run, where its nodes did not come back
        self._status: int | None = None  # the run's exit status, if the meeting decided it
        if record.notifier:
            record.notifier.is_speaker = self._speaks

    def _speaks(self) -> bool:
        """Return whether this node notifies for all: it is the first of those that answer."""
        others = (int(node) for node in self._hosts.keys() - self._lost)
        return self._node <= min(others, default=self._node)

    def telling(self, decision: Decision) -> Telling:
        """Return what this node tells people of a decision.

        If it would stop, and must first tell the others, it tells nothing.
        """
        is_silent = self._own.action == STOP and decision.action == AGAIN
        return Telling(self._host, self._diagnosis, is_silent)

    def status(self, own: int) -> int:
        """Return the run's exit status: its own, or that of the nodes' decision."""
        return own if self._status is None else self._status

    def begins(self, number: int, gathered: RunInputs) -> RunInputs:
        """Return the inputs of the next attempt: the nodes' number, and the keys that they share.

        Args:
            number: the attempt's number on this node alone.
            gathered: the run's inputs.
        """
        gathered = gathered._replace(identity=gathered.identity._replace(attempt=self._number))
        if self._keys is None or gathered.profile is None:
            return gathered
        return gathered._replace(profile=node_facts.with_keys(gathered.profile, *self._keys))

    def environ(self, plan: LaunchPlan) -> dict[str, str]:
        """Return the variables with which the next agent comes to the meeting.

        Args:
            plan: the attempt's plan.
        """
        profile = self._gathered.profile
        assert profile is not None, "a supervised run has one"
        offers = self._resumption.offers
        path = plan.checkpoint.path if plan.checkpoint else ""
        keys, free = self._keys or (node_facts.keys(profile), [])
        start: AgreedStart = {
            "evidence": self._evidence,
            "checkpoint": next((offer for offer in offers if offer["path"] == path), None),
            "offers": offers,
            "keys": keys,
            "free": free,
        }
        facts = {
            **self._facts,
            "attempt": self._number,
            "mitigations": list(plan.mitigations),
            "report": self._report,
            "start": start,
        }
        rejoin_s = plan.settings.retry.rejoin_s
        value = {
            **{"facts": facts, "directory": self._new_place(), "rejoin_s": rejoin_s},
            "since": self._since,
            "expects": self._regroups > 0 and len(self._hosts) > 1,
        }
        return {node_agent.VARIABLE: json.dumps(value, separators=(",", ":"))}

    def met(self, attempt: Attempt, ended: AttemptEnd, last: AttemptOutcome | None) -> Agreed:
        """Return the nodes' agreement before an attempt that has now ended.

        Args:
            attempt: the attempt.
            ended: how it ended.
            last: the last attempt with ranks before it.

        Returns:
            With a decision if no rank was started; without one if ranks ran, or may have run.
        """
        outcome: node_agreement.MeetingOutcome | None = self._read(
            node_agent.outcome_name(self._number)
        )
        self._outcome = outcome if outcome and "agreement" in outcome else None
        self._since = None
        ends = ended.exit_code == 0 or ended.end_requested
        if ends and self._outcome is None:
            return Agreed()
        if outcome is None:
            is_lost = self._comes_back and not attempt.evidence.ranks_ran
            return Agreed(self._agent_lost(ended) if is_lost else None)
        if "alone" in outcome:
            return self._not_met(attempt.plan, outcome["alone"], last)
        if "again" in outcome:
            return Agreed(self._anew(outcome["again"], outcome["start"]))
        agreement = outcome["agreement"]
        self._node = outcome["node"]
        self._hosts, self._holder = agreement["hosts"], agreement["holder"]
        known: dict[str, Any] = {**agreement, "attempt": self._number}
        self._record.journal.event(NodesMet(**{name: known[name] for name in NodesMet._fields}))
        last = self._with_root(last, agreement["root"])
        self._report, start = None, agreement["start"]
        if start and (agreement["action"] == node_agreement.BEGIN or outcome.get("began")):
            self._evidence = start["evidence"] + (agreement["action"] == node_agreement.BEGIN)
            self._keys, self.start = (start["keys"], start["free"]), None
            self._agents_lost = 0
        if agreement["action"] == node_agreement.BEGIN or ends:
            self._regroups, self._comes_back, self._own = 0, False, Decision(AGAIN, "")
            return Agreed(None, last)
        return self._without_ranks(agreement, last)

    def _agent_lost(self, ended: AttemptEnd) -> Decision:
        """Return the decision after an agent ended before it met the others."""
        self._agents_lost += 1
        why = f"torchrun ended with status {ended.exit_code} before the nodes met"
        if self._agents_lost < AGENTS:
            return Decision(AGAIN, f"{why}: they meet again")
        self._status = ended.exit_code
        return Decision(STOP, f"{why}, {AGENTS} times in a row")

    def _anew(self, why: str, start: AgreedStart | None) -> Decision:
        """Return the decision to meet again after ranks have run, since nodes came or went."""
        if start is not None:
            self._evidence, self._keys = start["evidence"], (start["keys"], start["free"])
        self.start = None
        self._number += 1
        self._regroups += 1
        if self._regroups > REGROUPS:
            self._status = 1
            return Decision(STOP, f"{why}, {REGROUPS} times in a row")
        return Decision(AGAIN, f"{why}: attempt {self._number} starts")

    def _not_met(self, plan: LaunchPlan, alone: Alone, last: AttemptOutcome | None) -> Agreed:
        """Return the end of a run whose nodes did not meet again."""
        self._status = 1
        if (root := alone["root"]) and last:
            last = self._with_root(last, root)
            decision = self._decided_by(root, plan.mitigations)
            if decision.action == STOP:
                return Agreed(decision, last)
        if self._own.action == STOP:
            return Agreed(self._own, last)
        where, limit = alone["unreached"], plan.settings.retry.rejoin_s
        names = self._holder if where else self._missing(alone["came"])
        lost = f"{names} did not come back" if names else "not all of the other nodes came back"
        if where:
            lost = f"{names or 'the host of the rendezvous'} did not answer again at {where}"
        if where and names == self._facts["host"]:
            lost, names = f"the rendezvous at {where} could not be opened again", ""
        if last and last.diagnosis.verdict:
            from saferun.diagnosis.deciding import classify  # only a failure needs it

            known = signatures.load()
            self._diagnosis = classify.by_nodes(last.diagnosis, lost, known, ends=True)
            self._host = names
        return Agreed(Decision(STOP, f"{lost} in time (retry.rejoin_s: {seconds(limit)})"), last)

    def _missing(self, came: list[str]) -> str:
        """Return the hosts that did not come, in words; "" if unknown."""
        left = list(self._hosts.values())
        for host in came:
            if host in left:
                left.remove(host)
        return ", ".join(sorted(left))

    def _without_ranks(self, agreement: Agreement, last: AttemptOutcome | None) -> Agreed:
        """Return what is decided after a meeting that started no rank."""
        self._regroups += 1
        unfit = agreement["unfit"]
        if agreement["action"] == node_agreement.REFUSE or self._node in unfit:
            self._status = EXIT_CONFIG
            return Agreed(Decision(STOP, agreement["why"]), last)
        if agreement["action"] == node_agreement.STOP:
            self._status = last.exit_code if last else 1
            root = agreement["root"]
            assert root is not None, "a root's decision is to stop"
            return Agreed(Decision(STOP, root["decision"]["reason"]), last)
        if self._regroups > REGROUPS:
            self._status = 1
            why = f"the nodes met {REGROUPS} times and never began together"
            return Agreed(Decision(STOP, why), last)
        self._number = agreement["attempt"]
        self._take(agreement["start"])
        why = "the nodes meet again"
        if unfit:
            without = ", ".join(agreement["hosts"][str(node)] for node in unfit)
            why = f"the others go on without {without}: {agreement['why']}"
        return Agreed(Decision(AGAIN, why), last, tuple(agreement["mitigations"]))

    def _take(self, start: AgreedStart | None) -> None:
        """Adopt the start that the nodes agreed on, and name the keys that it changes here."""
        if start is None or start["offers"] is None:
            self.start = None  # they have not looked yet: their ranks were running until now
            return
        self.start, self._evidence = start, start["evidence"]
        profile = self._gathered.profile
        assert profile is not None, "a supervised run has one"
        own = node_facts.keys(profile)
        self._keys = start["keys"], start["free"]
        for name in node_agreement.differing(own, start):
            there, here = start["keys"].get(name, "not set"), own.get(name, "not set")
            self._say(f"{name} is {there} as on the other nodes of the run, not {here}")

    def _with_root(
        self, last: AttemptOutcome | None, root: NodeReport | None
    ) -> AttemptOutcome | None:
        """Return the last attempt as the node knows it where the failure began."""
        if root is None or last is None or root["attempt"] != last.number:
            return last
        self._host = root["host"]
        known = {key: _tuples(value) for key, value in root["diagnosis"].items()}
        own = set(_SHARED) & set(AttemptOutcome._fields)  # the others are the diagnosis's
        facts = {key: _tuples(root["facts"][key]) for key in own}
        # The verdict stays its own: whether this node's hardware is trusted depends on it.
        diagnosis = Diagnosis(**known)._replace(verdict=last.diagnosis.verdict)
        return last._replace(diagnosis=diagnosis, **facts)

    def lost(self) -> str:
        """Return the agent's message on nodes that it lost in its last attempt; "" for none."""
        loss: node_agreement.LostNodes | None = self._read(node_agent.loss_name(self._number))
        self._lost = [] if loss is None else [str(node) for node in loss["nodes"]]
        return "" if loss is None else loss["why"]

    def shared(self, ended: AttemptEnd, last: AttemptOutcome, decision: Decision) -> Agreed:
        """Return the nodes' decision after an attempt with ranks that has failed or succeeded.

        The nodes decide together: this node's own decision goes into its report.

        Args:
            ended: how the attempt ended.
            last: its record.
            decision: this node's own decision.
        """
        outcome = self._outcome
        self._number = last.number + 1
        self._host = self._facts["host"]
        if last.way != FAILED or outcome is None:
            return Agreed(decision)
        from saferun.diagnosis.deciding import classify  # only a failure needs it

        diagnosis = last.diagnosis
        if diagnosis.kind == "node-lost":
            lost = ", ".join(self._hosts[node] for node in self._lost if node in self._hosts)
            self._host = lost or self._host
        failed_at = ended.started_at + ended.lived_s
        leaves = decision.action == STOP and _is_of_hardware(diagnosis)
        self._own = decision
        known = {**as_tree(diagnosis), "nearest": []}
        self._report = {
            "attempt": last.number,
            "host": self._host,
            "node": outcome["node"],
            "weight": classify.weight(diagnosis, signatures.load()),
            "after_s": round(max(0.0, failed_at - outcome["at"]), 3),
            "diagnosis": cleaned(known, self._record.journal.masked, TEXT_CHARS),
            "facts": {key: getattr(last, key) for key in _SHARED},
            "decision": decision._asdict(),
            "leaves": leaves,
        }
        self._comes_back = True
        self._since = time.monotonic() + decision.delay_s
        if leaves:  # it attends no meeting: a spare node can take its place
            return Agreed(decision)
        delay_s = decision.delay_s if decision.action == AGAIN else 0.0
        return Agreed(Decision(AGAIN, decision.reason, delay_s, decision.add))

    def _decided_by(self, root: NodeReport, in_force: tuple[str, ...]) -> Decision:
        """Return the decision of the node where the failure began; all nodes have read it."""
        is_here = self._report is not None and root["node"] == self._report["node"]
        self._report, self._own = None, Decision(AGAIN, "")
        if root.get("leaves") and not is_here:
            return Decision(AGAIN, f"the others go on without {root['host']}")
        decision = Decision(**root["decision"])
        if decision.add in in_force:
            decision = decision._replace(add="")
        return decision

    def _new_place(self) -> str | None:
        """Return the directory to which a new agent writes the nodes' decisions; None if none.

        It is not on a full disk, where the nodes would not learn why they have to end. An agent may
        be made before the one that runs has ended, and the disk fill up between the two.
        """
        place = self._gathered.identity.receipts
        if place is not None and disk_room.has(place, _ROOM_BYTES):
            return place
        if self._temporary is None:
            with contextlib.suppress(OSError):
                self._temporary = tempfile.mkdtemp(prefix="saferun-nodes-")
        return self._temporary

    def close(self) -> None:
        """Remove what was made only for this run."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _read(self, name: str) -> Any:  # parsed JSON: an MeetingOutcome or a LostNodes
        for place in filter(None, (self._gathered.identity.receipts, self._temporary)):
            path = os.path.join(place, name)
            if (content := files.read_private(path)) is not None:
                try:
                    os.unlink(path)  # another start of the same attempt writes its own
                    return json.loads(content)
                except (OSError, ValueError):
                    return None
        return None


def _is_of_hardware(diagnosis: Diagnosis) -> bool:
    """Return whether a node's hardware failed, so that another node can replace it."""
    return (diagnosis.group, diagnosis.verdict) == ("hardware-driver", "stop-hardware")


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
