"""Pure: the facts that nodes exchange before an attempt, and the decision that follows.

Each node brings its facts: the attempt that it begins, its mitigations in force, the checkpoint
from which its ranks would resume, and, after a failure, its report on the previous attempt. One
node calls `agree` with the facts of all, and every node gets the result. Two nodes that call it
with the same facts get the same result.

The nodes whose ranks have run together in the most attempts decide the state from which an attempt
begins. A new node adopts that state and returns with it. Of several checkpoints, the newest that
all deciding nodes have is used. A new node counts as one of them once it has found the same files;
if it has not, and no older checkpoint is left, the nodes do not fit.

The weight of a report is ROOT if its kind names a cause, WEAK if it says little about one (a rank
that ended without a reason, a silent node), and ECHO if it is what the survivors of a failure
elsewhere see. Among reports of equal weight the earliest counts, then the lowest node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class NodeReport(TypedDict):
    """The failure of an attempt, as one node sees it."""

    attempt: int
    host: str
    weight: int  # ROOT, WEAK or ECHO
    after_s: float  # seconds from the nodes' meeting to the failure, by this node's clock
    diagnosis: dict[str, Any]  # result of diagnosis/deciding/classify.py
    facts: dict[str, Any]  # fields of an AttemptOutcome: kind, offered, fingerprint, ...
    decision: dict[str, Any]  # result of diagnosis/deciding/retry_policy.py on that node
    leaves: bool  # its hardware has failed: the others continue without it
    node: int  # its node rank in the attempt


class Offer(TypedDict):
    """A complete checkpoint of this run."""

    path: str
    step: int  # the number in its name; -1 without one
    at_s: float  # the time of the last write, in seconds since the epoch
    stamp: list[int]  # see system/checkpoints.py: equal for one file on every node


class AgreedStart(TypedDict):
    """The state that the ranks of an attempt begin from."""

    evidence: int  # number of attempts in which the deciding nodes' ranks have run
    checkpoint: Offer | None
    offers: list[Offer] | None  # usable checkpoints, the newest first; None: not looked for
    keys: dict[str, Any]  # profile keys that change the ranks' behaviour: value by dotted name
    free: list[str]  # keys that differed on the first nodes, and may stay different


class NodeFacts(TypedDict, total=False):
    """The facts that a node brings to a meeting."""

    host: str
    attempt: int  # the attempt that it is about to begin
    mitigations: list[str]
    report: NodeReport | None
    start: AgreedStart
    saferun: str
    torch: str
    nnodes: str  # --nnodes as given
    script: str  # the script's file name
    resume: str  # value of retry.resume
    resume_args: str
    content: str  # checksum of the script; "" if unknown
    rerun: bool  # torchrun has restarted the ranks of a running attempt
    beats: bool  # node 0 has prepared the store for heartbeats
    holds: bool  # this node hosts the rendezvous' store


class Agreement(TypedDict):
    """The decision that all nodes follow."""

    action: str  # BEGIN, REGROUP, STOP, REFUSE
    attempt: int
    mitigations: list[str]
    root: NodeReport | None
    why: str  # differences, by host, if the nodes do not fit
    warning: str  # tolerated differences; "" for none
    hosts: dict[str, str]  # node rank -> host
    beats: bool  # heartbeats are possible, according to node 0
    start: AgreedStart | None
    unfit: list[int]  # nodes that cannot begin from the common state; `why` explains it
    holder: str  # host of the rendezvous' store; "" if unknown


class MeetingOutcome(TypedDict, total=False):
    """The result of a meeting that a node's agent writes: one of the first three keys."""

    agreement: Agreement
    alone: Alone
    again: str  # why the nodes have to meet again after ranks have run
    start: AgreedStart | None  # the state from which they began; for `again`
    node: int  # the node's rank in the meeting
    began: bool  # this agent's ranks ran before the meeting
    at: float  # seconds since the epoch


class Alone(TypedDict):
    """Not all nodes came back; the value is equal on nodes that could exchange it."""

    came: list[str]  # hosts
    unreached: str  # the endpoint that did not answer; "" if it did
    root: NodeReport | None  # the root among the reports of the nodes that came


class LostNodes(TypedDict, total=False):
    """The message of an agent that has lost other nodes during an attempt."""

    why: str
    nodes: list[int]
    at: float


ROOT, WEAK, ECHO = 0, 1, 2
# All begin their ranks; all leave and return with the agreement; the run is over; the nodes do not
# fit.
BEGIN, REGROUP, STOP, REFUSE = "begin", "regroup", "stop", "refuse"
REGROUP_STATUS = 79  # exit status of an agent that leaves before it starts a rank
NAMES = {
    **{"saferun": "saferun", "torch": "torch", "nnodes": "--nnodes", "script": "script"},
    **{"resume": "retry.resume", "resume_args": "retry.resume_args"},
}


def agree(facts: Mapping[int, NodeFacts]) -> Agreement:
    """Return what all nodes do next.

    Args:
        facts: the facts of all nodes, by node rank.
    """
    hosts = {str(node): fact["host"] for node, fact in facts.items()}
    attempt = max(fact["attempt"] for fact in facts.values())
    knowing = _knowing(facts)
    latest = max(fact["attempt"] for fact in knowing.values())
    ready = [fact for _, fact in sorted(knowing.items()) if fact["attempt"] == latest]
    root = root_report([fact.get("report") for fact in ready])
    mitigations = _union([fact["mitigations"] for fact in ready])
    if root is not None and root["decision"]["add"]:
        mitigations = _union([mitigations, [root["decision"]["add"]]])
    start, lacking = _start(facts, knowing)
    action = BEGIN
    if any(set(fact["mitigations"]) != set(mitigations) for fact in facts.values()):
        action = REGROUP
    if any(fact["attempt"] < attempt or not _begins(fact, start) for fact in facts.values()):
        action = REGROUP
    if root is not None and root["decision"]["action"] == "stop":
        action = STOP
    why = differences(facts, hosts)
    if lacking and not why and action != STOP:
        why = _not_seen(knowing, lacking, hosts)
        if len(facts) - len(lacking) >= int(facts[min(facts)]["nnodes"].partition(":")[0] or 0):
            action = REGROUP  # the others continue without them
        else:
            action = REFUSE
    elif why:
        action = REFUSE
    return {
        "action": action,
        "attempt": attempt,
        "mitigations": mitigations,
        "root": root,
        "why": why,
        "warning": _other_contents(facts, hosts),
        "hosts": hosts,
        "beats": facts[min(facts)].get("beats", False),
        "start": start,
        "unfit": lacking,
        "holder": next((fact["host"] for fact in facts.values() if fact.get("holds")), ""),
    }


def refusal(facts: NodeFacts, hosts: dict[str, str], why: str) -> Agreement:
    """Return the agreement that nodes do not fit, for a reason outside the facts.

    Args:
        facts: the facts of one node.
        hosts: host by node rank.
        why: the reason, for people.
    """
    return {**agree({0: {**facts, "report": None}}), "action": REFUSE, "why": why, "hosts": hosts}


def is_one(offer: Offer | None, other: Offer | None, *, by_stamp: bool = False) -> bool:
    """Return whether two offers mean one checkpoint: by name and step, or by the file itself.

    Args:
        offer: one node's offer; None for the beginning.
        other: another node's offer.
        by_stamp: only the same file counts, which is needed if names have no number.
    """
    if offer is None or other is None:
        return offer is other
    if (offer["path"], offer["step"]) != (other["path"], other["step"]):
        return False
    return offer["stamp"] == other["stamp"] or not (by_stamp or offer["step"] < 0)


def differing(keys: Mapping[str, Any], start: AgreedStart) -> list[str]:
    """Return the profile keys that differ from those with which an attempt begins."""
    names = sorted({*keys, *start["keys"]} - set(start["free"]))
    return [name for name in names if keys.get(name) != start["keys"].get(name)]


def _knowing(facts: Mapping[int, NodeFacts]) -> dict[int, NodeFacts]:
    """Return the deciding nodes, whose ranks have run; if none, those with the highest attempt."""
    starts = {node: fact["start"]["evidence"] for node, fact in facts.items() if "start" in fact}
    most = max(starts.values(), default=0)
    if most > 0:
        return {node: facts[node] for node, evidence in starts.items() if evidence == most}
    attempt = max(fact["attempt"] for fact in facts.values())
    return {node: fact for node, fact in facts.items() if fact["attempt"] == attempt}


def _start(
    facts: Mapping[int, NodeFacts], knowing: Mapping[int, NodeFacts]
) -> tuple[AgreedStart | None, list[int]]:
    """Return the state from which all begin, and the deciding nodes that cannot use it."""
    starts = {node: fact["start"] for node, fact in sorted(knowing.items()) if "start" in fact}
    if not starts:
        return None, []
    first = starts[min(starts)]
    if first["evidence"] == 0:
        keys, free = _first_keys([fact["start"] for _, fact in sorted(facts.items())])
        first = {**first, "keys": keys, "free": free}
    lists = [start["offers"] for start in starts.values()]
    if None in lists:
        if all(fact.get("rerun") for fact in facts.values()):
            return first, []
        return {**first, "offers": None, "checkpoint": None}, []
    found = [offer for offers in lists for offer in offers or ()]
    found.sort(key=lambda offer: (offer["at_s"], offer["step"]), reverse=True)
    common = [offer for offer in found if all(_has(offers or [], offer) for offers in lists)]
    lacking = [n for n, one in starts.items() if found and not _has(one["offers"] or [], found[0])]
    # If no checkpoint is common, the newest is used; nodes without it cannot begin with the others.
    chosen = next(iter(common or found), None)
    return {**first, "offers": found, "checkpoint": chosen}, [] if common else lacking


def _has(offers: Sequence[Offer], wanted: Offer) -> bool:
    return any(is_one(offer, wanted) for offer in offers)


def _first_keys(starts: Sequence[AgreedStart]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys for a run that begins; for variables, only those equal on all nodes.

    The first node's hook settings are used. A profile's variables may concern only one machine.
    """
    keys = starts[0]["keys"]
    names = {name for start in starts for name in start["keys"] if name.startswith("env.")}
    free = [n for n in sorted(names) if len({str(one["keys"].get(n)) for one in starts}) > 1]
    return {name: value for name, value in keys.items() if name not in free}, free


def _begins(fact: NodeFacts, start: AgreedStart | None) -> bool:
    """Return whether a node's ranks would begin from the common state."""
    if start is None or "start" not in fact:
        return start is None
    if differing(fact["start"]["keys"], start):
        return False
    if start["offers"] is None and not fact.get("rerun"):
        return False
    return is_one(fact["start"]["checkpoint"], start["checkpoint"])


def _not_seen(
    knowing: Mapping[int, NodeFacts], lacking: Sequence[int], hosts: Mapping[str, str]
) -> str:
    has = {node: fact["start"]["offers"] or [] for node, fact in knowing.items()}
    newest = max((o for found in has.values() for o in found), key=lambda o: (o["at_s"], o["step"]))
    there = ", ".join(hosts[str(node)] for node in sorted(has) if node not in lacking)
    where = ", ".join(hosts[str(node)] for node in lacking)
    return (
        f"the run goes on from {newest['path']} of {there}, which is not there on {where}, or is "
        "another file: checkpoints belong on storage that all nodes see"
    )


def root_report(reports: Sequence[NodeReport | None]) -> NodeReport | None:
    """Return the report of the node where the failure began; None if there is none."""
    given = [report for report in reports if report is not None]
    latest = max((report["attempt"] for report in given), default=0)
    newest = [report for report in given if report["attempt"] == latest]
    return min(newest, key=lambda r: (r["weight"], r["after_s"], r["node"]), default=None)


def _union(lists: list[list[str]]) -> list[str]:
    """Return the names in all lists, each once, in the order of their occurrence."""
    return list(dict.fromkeys(name for names in lists for name in names))


def _by_value(
    facts: Mapping[int, NodeFacts], hosts: Mapping[str, str], key: str
) -> dict[str, list[str]]:
    """Return the hosts by their value of a fact, in the order of the nodes."""
    values: dict[str, list[str]] = {}
    for node, fact in sorted(facts.items()):
        values.setdefault(str(fact.get(key, "")), []).append(hosts[str(node)])
    return values


def differences(facts: Mapping[int, NodeFacts], hosts: Mapping[str, str]) -> str:
    """Return the differences that make the nodes unfit for one run, by host; "" for none."""
    for key, name in NAMES.items():
        values = _by_value(facts, hosts, key)
        if len(values) > 1:
            parts = [f"{value} on {', '.join(on)}" for value, on in values.items()]
            return f"{name} differs: {'; '.join(parts)}"
    return ""


def _other_contents(facts: Mapping[int, NodeFacts], hosts: Mapping[str, str]) -> str:
    """Return a warning that nodes have different scripts of the same name; "" for none."""
    values = _by_value(facts, hosts, "content")
    values.pop("", None)
    if len(values) < 2:
        return ""
    groups = ", another one on ".join(", ".join(on) for on in values.values())
    return f"{facts[min(facts)]['script']} is one file on {groups}; copy one of them to all nodes"
