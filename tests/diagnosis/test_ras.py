"""What NCCL's RAS says of a job, and when it says nothing."""

import json
import re
from typing import Any

import pytest

from saferun.diagnosis.flight_record import CollectiveFinding
from saferun.diagnosis.ras import compare, read

PIDS = {100: 0, 101: 1, 102: 2}


def member(rank: int, launched: int, *, pid: int | None = None) -> dict[str, Any]:
    """Return a rank as NCCL 2.28 prints it."""
    return {
        **{"rank": rank, "host": "10.0.0.1", "pid": 100 + rank if pid is None else pid},
        **{"cuda_dev": rank, "nvml_dev": rank, "status": {"init_state": 0, "async_error": 0}},
        "collective_counts": {"Broadcast": 1, "AllReduce": launched - 1, "Send": rank},
    }


def missing(rank: int, **status: bool) -> dict[str, Any]:
    return {**{"rank": rank, "host": "10.0.0.1", "pid": 100 + rank}, "status": status}


def answer(*ranks: dict[str, Any], gone: tuple[dict[str, Any], ...] = ()) -> Any:
    comm = {"hash": "0x1", "secondary_hash": "0x2:0x3", "size": len(ranks) + len(gone)}
    comm |= {"ranks": list(ranks), "missing_ranks": list(gone)}
    document = {"nccl_version": "2.28.9", "communicators": [comm]}
    # As NCCL 2.28.9 prints it: without the comma before the status of a rank that is missing.
    text = re.sub(r',(\s+"status")', r"\1", json.dumps(document, indent=2))
    found = read(f"SERVER PROTOCOL 2\nOK\n{text}\n".encode())
    assert found is not None
    return found


def told(stands: Any, pids: dict[int, int] = PIDS, world: int = 0) -> CollectiveFinding:
    """Return who is behind where an answer comes twice."""
    found = compare(stands, stands, pids, world)
    assert found is not None
    return found


def test_the_rank_that_launched_fewer_collectives_twice_is_behind():
    stands = answer(member(0, 41), member(1, 40), member(2, 41))
    found = told(stands)
    assert (found.kind, found.ranks) == ("hang", (1,))
    assert found.line == "rank 1 launched 40 collectives, others of its group 41"


def test_what_moves_or_is_equal_tells_nothing():
    before = answer(member(0, 41), member(1, 40), member(2, 41))
    after = answer(member(0, 42), member(1, 41), member(2, 42))
    assert compare(before, after, PIDS) is None
    same = answer(member(0, 41), member(1, 41), member(2, 41))
    assert compare(same, same, PIDS) is None


def test_a_rank_that_is_dead_or_does_not_answer_is_behind():
    for status in ({"considered_dead": True}, {"unresponsive": True}):
        stands = answer(member(0, 41), member(2, 41), gone=(missing(1, **status),))
        found = told(stands)
        assert found.ranks == (1,)
        assert found.line == "rank 1: dead, or gives no answer"
    alive = answer(member(0, 41), member(2, 41), gone=(missing(1, unresponsive=False),))
    assert compare(alive, alive, PIDS) is None, "it has left the communicator"


def test_an_answer_of_another_job_tells_nothing():
    other = answer(member(0, 41, pid=7), member(1, 40, pid=8))
    assert compare(other, other, PIDS) is None
    far = answer(member(0, 41), member(1, 40, pid=7))
    found = told(far)
    assert (found.ranks, found.line.partition(" launched")[0]) == ((), "pid 7 on 10.0.0.1")


def test_a_rank_of_another_machine_or_one_that_has_ended_has_its_number_where_all_are_together():
    here = {100: 0, 102: 2}
    stands = answer(member(0, 41), member(2, 41), gone=(missing(1, considered_dead=True),))
    found = told(stands, here, 3)
    assert (found.ranks, found.gone) == ((), (1,))
    assert found.line == "rank 1 on 10.0.0.1: dead, or gives no answer"
    slow = answer(member(0, 41), member(1, 40), member(2, 41))
    found = told(slow, here, 3)
    assert (found.ranks, found.gone) == ((), ())
    assert found.line == "rank 1 on 10.0.0.1 launched 40 collectives, others of its group 41"
    for pids, world in ((here, 4), ({100: 4, 102: 6}, 3)):
        found = told(stands, pids, world)
        assert (found.ranks, found.gone) == ((), ()), "a communicator of some has other numbers"
        assert found.line == "pid 101 on 10.0.0.1: dead, or gives no answer"


def test_a_rank_that_is_gone_counts_before_one_that_is_behind():
    stands = answer(member(0, 41), member(2, 40), gone=(missing(1, considered_dead=True),))
    found = told(stands)
    assert (found.ranks, found.gone) == ((1,), (1,))


HEAD = """\
SERVER PROTOCOL 2
ERROR: Unknown command SET FORMAT json
NCCL version 2.27.5 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      1          3            1          3        3

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         3         3         3   RUNNING  {errors}

Errors
======

{wrong}Warnings
========

{warned}"""
ONE_BEHIND = """\
#0-0 (9d1f4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  2 ranks have launched up to operation 41
  Rank 1 has launched up to operation 40 -- GPU 1 managed by process 101 on node 10.0.0.1

"""
TWO_BEHIND = """\
#0-0 (9d1f4a) MISMATCH
  Communicator ranks have different AllReduce operation counts
  2 ranks have not launched any operations
  Rank 1 -- GPU 1 (NVML 5) managed by process 101 on node 10.0.0.1
  Rank 2 -- GPU 2 managed by process 102 on node 10.0.0.1
  Rank 0 has launched up to operation 1 -- GPU 0 managed by process 100 on node 10.0.0.1

"""
MOST_BEHIND = ONE_BEHIND.replace("operation 41", "operation 39")
SILENT = """\
INCOMPLETE
  Missing communicator data from 1 job process
  Process 101 on node 10.0.0.1 managing GPU 1

#0-0 (9d1f4a) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 1 managed by process 101 on node 10.0.0.1

"""
TEXTS = {
    "well": ("", "", None, ""),
    "one is behind": (
        "",
        ONE_BEHIND,
        (1,),
        "rank 1 launched 40 collectives, others of its group 41",
    ),
    "two are behind": ("", TWO_BEHIND, (1, 2), "rank 1 and 1 more launched 0 collectives"),
    "those who are behind are not named": ("", MOST_BEHIND, None, ""),
    "one does not answer": (SILENT, "", (1,), "rank 1: dead, or gives no answer"),
}


@pytest.mark.parametrize(("wrong", "warned", "ranks", "line"), TEXTS.values(), ids=TEXTS)
def test_the_text_of_an_older_nccl_is_read(wrong, warned, ranks, line):
    text = read(HEAD.format(errors="OK", wrong=wrong, warned=warned).encode())
    assert text is not None
    found = compare(text, text, PIDS)
    assert (found.ranks if found else None) == ranks
    assert found is None or found.line.startswith(line)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"NCCL version 2.24.3\nJob summary\n", b"ERROR: Unknown command SET FORMAT json\n",
     b'{"communicators": 7}', b'{"communicators": [7]}', b'{"communicators": [{"hash": 1}]}',
     b'{"communicators": [{"hash": 1, "secondary_hash": 1, "ranks": [{"rank": "x"}]}]}'],
)  # fmt: skip
def test_another_answer_is_none(content):
    assert read(content) is None
