"""Pure: what the nodes of a run tell each other before an attempt, and what follows from it.

Each node brings its facts: the attempt that it begins, the mitigations in force there, and, after a
failure, its report of the attempt before. `agree` is called on one of them, on facts of all, and
every node gets its result. Two nodes that call it with the same facts get the same result.

A report weighs ROOT where its kind names a cause, WEAK where it says little of one (a rank that
ended without a reason, a node that went silent), ECHO where it is what the survivors of a failure
elsewhere see. Among reports of one weight the earliest counts, then the lowest node.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypedDict

    class Report(TypedDict):
        """How an attempt failed, as one node sees it."""

        attempt: int
        host: str
        weight: int  # ROOT, WEAK or ECHO
        after_s: float  # from the nodes' meeting to the failure, by this node's own clock
        diagnosis: dict[str, Any]  # of diagnosis/classify.py
        facts: dict[str, Any]  # of diagnosis/retry_policy.py's Try: kind, verdict, fingerprint, ...
        decision: dict[str, Any]  # of diagnosis/retry_policy.py, made on that node
        leaves: bool  # its hardware has failed: the others go on without it
        node: int  # its node rank in the attempt

    class Facts(TypedDict, total=False):
        """What a node brings to a meeting."""

        host: str
        attempt: int  # that it is about to begin
        mitigations: list[str]
        report: Report | None
        saferun: str
        torch: str
        nnodes: str  # as given
        script: str  # its file name
        content: str  # a checksum of the script; "" where it is not known
        shared: str  # a directory and a word in it, by which others tell whether they share it
        run_dir: str  # that the user gave for it; "" for none
        beats: bool  # of node 0: it has prepared the store for heartbeats

    class Agreement(TypedDict):
        """What all nodes do."""

        action: str  # BEGIN, REGROUP, STOP, REFUSE
        attempt: int
        mitigations: list[str]
        root: Report | None
        why: str  # of a refusal: what differs, by host
        warning: str  # what differs and is not refused; "" for nothing
        hosts: dict[str, str]  # node rank -> host
        shared: str  # of node 0; "" where not all nodes share it
        beats: bool  # of node 0

    class Outcome(TypedDict, total=False):
        """How a node's agent leaves word of a meeting: one of the first two."""

        agreement: Agreement
        alone: str  # why it did not meet the others
        node: int  # its rank there
        at: float  # seconds since the epoch

    class Loss(TypedDict, total=False):
        """How it leaves word that it has lost others during an attempt."""

        why: str
        nodes: list[int]
        at: float


ROOT, WEAK, ECHO = 0, 1, 2
# All begin their ranks; all leave to come back with what was agreed; the run is over; the nodes do
# not fit.
BEGIN, REGROUP, STOP, REFUSE = "begin", "regroup", "stop", "refuse"
REGROUP_STATUS = 79  # the exit status of an agent that leaves before it has started a rank
NAMES = {"saferun": "saferun", "torch": "torch", "nnodes": "--nnodes", "script": "script"}


def agree(facts: Mapping[int, Facts], unseen: Sequence[int] = ()) -> Agreement:
    """Return what all nodes do next.

    Args:
        facts: of all nodes, by node rank.
        unseen: the nodes whose directory the node that calls this does not see.
    """
    hosts = {str(node): fact["host"] for node, fact in facts.items()}
    attempt = max(fact["attempt"] for fact in facts.values())
    ready = [fact for _, fact in sorted(facts.items()) if fact["attempt"] == attempt]
    root = root_report([fact.get("report") for fact in ready])
    mitigations = _union([fact["mitigations"] for fact in ready])
    if root is not None and root["decision"]["add"]:
        mitigations = _union([mitigations, [root["decision"]["add"]]])
    action = BEGIN
    if any(set(fact["mitigations"]) != set(mitigations) for fact in facts.values()):
        action = REGROUP
    if len(ready) < len(facts):
        action = REGROUP
    if root is not None and root["decision"]["action"] == "stop":
        action = STOP
    why = _differences(facts, hosts)
    return {
        "action": REFUSE if why else action,
        "attempt": attempt,
        "mitigations": mitigations,
        "root": root,
        "why": why,
        "warning": _other_contents(facts, hosts) or _not_shared(facts, unseen),
        "hosts": hosts,
        "shared": "" if unseen else facts[min(facts)].get("shared", ""),
        "beats": facts[min(facts)].get("beats", False),
    }


def refusal(hosts: dict[str, str], why: str) -> Agreement:
    """Return that nodes do not fit, for a reason of which facts say nothing."""
    return {
        "action": REFUSE,
        "attempt": 1,
        "mitigations": [],
        "root": None,
        "why": why,
        "warning": "",
        "hosts": hosts,
        "shared": "",
        "beats": False,
    }


def root_report(reports: Sequence[Report | None]) -> Report | None:
    """Return the report of the node where the failure began; None where there is none."""
    given = [report for report in reports if report is not None]
    latest = max((report["attempt"] for report in given), default=0)
    newest = [report for report in given if report["attempt"] == latest]
    return min(newest, key=lambda r: (r["weight"], r["after_s"], r["node"]), default=None)


def _union(lists: list[list[str]]) -> list[str]:
    """Return the names in all lists, each once, in the order in which they come."""
    return list(dict.fromkeys(name for names in lists for name in names))


def _by_value(
    facts: Mapping[int, Facts], hosts: Mapping[str, str], key: str
) -> dict[str, list[str]]:
    """Return the hosts by what they have of a fact, in the order of the nodes."""
    values: dict[str, list[str]] = {}
    for node, fact in sorted(facts.items()):
        values.setdefault(str(fact.get(key, "")), []).append(hosts[str(node)])
    return values


def _differences(facts: Mapping[int, Facts], hosts: Mapping[str, str]) -> str:
    """Return what makes the nodes unfit for one run, by host; "" for nothing."""
    for key, name in NAMES.items():
        values = _by_value(facts, hosts, key)
        if len(values) > 1:
            parts = [f"{value} on {', '.join(on)}" for value, on in values.items()]
            return f"{name} differs: {'; '.join(parts)}"
    return ""


def _other_contents(facts: Mapping[int, Facts], hosts: Mapping[str, str]) -> str:
    """Return which nodes have another script of the same name; "" for none."""
    values = _by_value(facts, hosts, "content")
    values.pop("", None)
    if len(values) < 2:
        return ""
    groups = ", another one on ".join(", ".join(on) for on in values.values())
    return f"{facts[min(facts)]['script']} is one file on {groups}; copy one of them to all nodes"


def _not_shared(facts: Mapping[int, Facts], unseen: Sequence[int]) -> str:
    """Return which given run directory not all nodes see; "" for none, and after attempt 1."""
    for node in unseen:
        fact = facts[node]
        if fact.get("run_dir") and fact.get("shared") and fact["attempt"] == 1:
            where = f"the run directory of {fact['host']} ({fact['run_dir']})"
            return f"{where} is not seen by all nodes: they tell each other by the rendezvous"
    return ""
