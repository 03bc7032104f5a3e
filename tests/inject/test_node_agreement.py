"""What several nodes agree on before an attempt, from the facts that each brings."""

import itertools
from typing import Any

import pytest

from saferun.inject.node.node_agreement import (
    BEGIN,
    ECHO,
    REFUSE,
    REGROUP,
    ROOT,
    STOP,
    NodeFacts,
    NodeReport,
    Offer,
    agree,
    differing,
    refusal,
    root_report,
)


def fact(host: str, attempt: int = 1, **more: Any) -> NodeFacts:
    whole: Any = {
        **{"host": host, "attempt": attempt, "mitigations": [], "report": None},
        **{"saferun": "1", "torch": "2.13", "nnodes": "2", "script": "train.py"},
        **more,
    }
    found: NodeFacts = whole
    return found


def report(host: str, weight: int, after_s: float = 1.0, **more: Any) -> NodeReport:
    decision = {"action": "again", "reason": "it may be temporary", "delay_s": 0.0, "add": ""}
    whole: Any = {
        **{"attempt": 1, "host": host, "node": int(host[1:]), "weight": weight},
        **{"after_s": after_s, "diagnosis": {"kind": host}, "facts": {}},
        **more,
        "decision": {**decision, **more.get("decision", {})},
    }
    found: NodeReport = whole
    return found


def offer(step: int, *, stamp: int = 0) -> Offer:
    name = f"/out/checkpoint-{step}" if step >= 0 else "/out/last"
    return {"path": name, "step": step, "at_s": float(step), "stamp": [step, stamp]}


def start(evidence: int, *offers: Offer, at: int = 0, **keys: Any) -> dict[str, Any]:
    """Return the start of a node that would go on from one of its offers."""
    checkpoint = offers[at] if offers else None
    whole = {"evidence": evidence, "checkpoint": checkpoint, "offers": list(offers)}
    return {"start": {**whole, "keys": keys, "free": []}}


def test_a_node_that_comes_new_takes_the_number_and_the_mitigations_of_the_others():
    found = agree({0: fact("h0"), 1: fact("h1")})
    assert (found["action"], found["attempt"], found["root"]) == (BEGIN, 1, None)
    assert found["hosts"] == {"0": "h0", "1": "h1"}
    found = agree({0: fact("h0"), 1: fact("h1", 3, mitigations=["nccl-p2p-off"])})
    assert (found["action"], found["attempt"]) == (REGROUP, 3)
    assert found["mitigations"] == ["nccl-p2p-off"]
    facts = {0: fact("h0", 2, mitigations=["a"]), 1: fact("h1", 2, mitigations=["b", "a"])}
    found = agree(facts)
    assert (found["action"], found["mitigations"]) == (REGROUP, ["a", "b"])


def test_the_mitigation_of_the_node_where_it_began_becomes_that_of_all():
    add = {"decision": {"add": "nccl-p2p-off"}}
    first = {
        0: fact("h0", 2, report=report("h0", ECHO)),
        1: fact("h1", 2, report=report("h1", ROOT, **add)),
    }
    found = agree(first)
    assert (found["action"], found["mitigations"]) == (REGROUP, ["nccl-p2p-off"])
    again = {node: fact(f"h{node}", 2, mitigations=["nccl-p2p-off"]) for node in (0, 1)}
    assert agree(again)["action"] == BEGIN


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_root_is_the_same_whoever_asks(order):
    """A cause before an echo, then the earliest, then the lowest node."""
    reports = [
        report("h0", ECHO, 0.1),
        report("h1", ROOT, 2.0),
        report("h2", ROOT, 1.0),
        report("h3", ROOT, 1.0),
    ]
    found = root_report([reports[place] for place in order])
    assert found["host"] == "h2"


def test_where_the_failure_began_decides_that_the_run_is_over():
    stop = {"decision": {"action": "stop", "reason": "it would happen again"}}
    echo = fact("h0", 2, report=report("h0", ECHO))
    root = fact("h1", 2, report=report("h1", ROOT, **stop))
    assert agree({0: echo, 1: root})["action"] == STOP
    gives_up = fact("h0", 2, report=report("h0", ECHO, **stop))
    root = fact("h1", 2, report=report("h1", ROOT))
    assert agree({0: gives_up, 1: root})["action"] == BEGIN


def test_a_report_of_an_earlier_attempt_is_no_root():
    old = fact("h0", 1, report=report("h0", ROOT))
    found = agree({0: old, 1: fact("h1", 3, report=report("h1", ECHO, attempt=2))})
    assert found["root"]["host"] == "h1"


def test_nodes_that_do_not_fit_are_refused_by_name():
    values = {
        "saferun": "1 2",
        "torch": "2.13 2.9",
        "--nnodes": "2 3",
        "script": "train.py eval.py",
    }
    for name, pair in values.items():
        ours, other = pair.split()
        found = agree({0: fact("h0"), 1: fact("h1", **{name.strip("-"): other})})
        assert found["action"] == REFUSE
        assert found["why"] == f"{name} differs: {ours} on h0; {other} on h1"


def test_a_script_that_is_another_one_on_some_nodes_is_named_and_not_refused():
    contents = ["aa", "bb", "aa", ""]
    found = agree({n: fact(f"h{n}", content=content) for n, content in enumerate(contents)})
    assert found["action"] == BEGIN
    expected = "train.py is one file on h0, h2, another one on h1; copy one of them to all nodes"
    assert found["warning"] == expected
    assert agree({0: fact("h0", content="aa"), 1: fact("h1", content="")})["warning"] == ""


A, B = offer(20), offer(10)


@pytest.mark.parametrize(
    ("starts", "action", "step"),
    [
        ([start(1, A, B), start(1, A, B)], BEGIN, 20),
        ([start(0), start(1, A, B)], REGROUP, 20),  # one that comes new, and is node 0
        ([start(0, offer(70)), start(2, A), start(1, offer(50))], REGROUP, 20),
        ([start(1, A, B), start(1, B)], REGROUP, 10),  # the newest that both have
        ([start(1, A, B, at=1), start(1, B)], BEGIN, 10),
        ([start(1), start(1)], BEGIN, None),
        ([start(1, A), start(1)], REFUSE, 20),
        ([start(1, offer(-1)), start(1, offer(-1, stamp=9))], REFUSE, -1),
        ([start(1, A, tuned="off"), start(0, A, tuned="on")], REGROUP, 20),
    ],
)
def test_all_begin_where_the_nodes_say_that_were_there(starts, action, step):
    found = agree({n: fact(f"h{n}", 2, **one) for n, one in enumerate(starts)})
    checkpoint = found["start"]["checkpoint"]
    assert (found["action"], checkpoint and checkpoint["step"]) == (action, step)


def test_a_node_that_does_not_see_the_checkpoint_is_named_and_an_elastic_run_goes_on():
    starts = [start(1, A), start(1)]
    whole = {n: fact(f"h{n}", 2, **one) for n, one in enumerate(starts)}
    found = agree(whole)
    assert (found["action"], found["unfit"]) == (REFUSE, [1])
    assert found["why"].startswith("the run goes on from /out/checkpoint-20 of h0, which is not ")
    assert "there on h1" in found["why"]
    elastic = {n: {**one, "nnodes": "1:2"} for n, one in whole.items()}
    found = agree(elastic)  # type: ignore[arg-type]  # NodeFacts with another value
    assert (found["action"], found["unfit"]) == (REGROUP, [1])
    assert found["start"]["checkpoint"] == A


def test_a_rank_that_has_just_run_is_asked_again_where_it_is():
    """Its agent does not know what has been saved meanwhile; torchrun's own restarts need not."""
    ran: Any = {**start(2, A)["start"], "offers": None}
    found = agree({0: fact("h0", 3, start=ran), 1: fact("h1", 1, **start(0))})
    assert (found["action"], found["start"] and found["start"]["offers"]) == (REGROUP, None)
    rerun = {n: fact(f"h{n}", 2, start=ran, rerun=True) for n in (0, 1)}
    assert agree(rerun)["action"] == BEGIN


def test_settings_are_those_of_the_first_node_and_variables_may_be_of_a_machine():
    keys = [{"hooks.shards": "warn", "env.A": "1"}, {"hooks.shards": "off", "env.A": "2"}]
    facts = {n: fact(f"h{n}", **start(0, **one)) for n, one in enumerate(keys)}
    found = agree(facts)
    assert (found["action"], found["start"]["free"]) == (REGROUP, ["env.A"])
    assert differing(keys[0], found["start"]) == []
    assert differing(keys[1], found["start"]) == ["hooks.shards"]


def test_a_refusal_for_another_reason_has_no_root():
    found = refusal(fact("h0", 2, report=report("h0", ROOT)), {"0": "h0"}, "the clock")
    assert (found["action"], found["why"], found["root"]) == (REFUSE, "the clock", None)
