"""What the dumps of torch's flight recorder say, and that nothing in them is carried out."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from runs import program

from saferun.diagnosis.evidence import Hang
from saferun.diagnosis.flight_record import CollectiveFinding, Dump, cause, compare, read

C10D = "/v/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"


def entry(number: int, name: str = "all_reduce", **fields: Any) -> dict[str, Any]:
    """Return an entry as torch 2.13 records it for NCCL."""
    frames = [
        {"name": "all_reduce", "filename": C10D, "line": 3245},
        {"name": "step", "filename": "/w/train.py", "line": 33},
    ]
    return {
        **{"frames": frames, "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg")},
        **{"collective_seq_id": number, "p2p_seq_id": 0, "op_id": number},
        **{"profiling_name": f"nccl:{name}", "input_sizes": [[4]], "output_sizes": [[4]]},
        **{"state": "completed", "retired": False, "is_p2p": False, "timeout_ms": 600000, **fields},
    }


def calls(*entries: dict[str, Any], **more: Any) -> Dump:
    whole = {"version": "2.10", "entries": list(entries), **more}
    found = read(pickle.dumps(whole, protocol=2))
    assert found is not None
    return found


def told(dumps: dict[int, Dump], asked: Collection[int] = ()) -> CollectiveFinding:
    found = compare(dumps, asked)
    assert found is not None
    return found


DONE = [entry(1), entry(2)]
WAITS = entry(3, state="started")


def test_the_rank_that_did_not_enter_a_collective_is_behind():
    found = told({0: calls(*DONE, WAITS), 1: calls(*DONE), 2: calls(*DONE, WAITS)})
    assert (found.kind, found.ranks) == ("hang", (1,))
    assert found.line == (
        "rank 1 has not entered all_reduce number 3 of group default_pg, "
        "in which ranks 0, 2 wait at /w/train.py:33 in step"
    )
    assert cause(found) == Hang("hang", 1, found.line)


def test_of_many_ranks_the_first_are_named_and_a_place_only_where_it_is_known():
    waits = entry(3, state="started", frames=[])
    found = told({0: calls(*DONE, waits), **{rank: calls(*DONE) for rank in range(1, 7)}})
    assert found.line == (
        "ranks 1, 2, 3, 4 and 2 more have not entered all_reduce number 3 of group default_pg, "
        "in which rank 0 waits"
    )


def test_the_rank_whose_gpu_has_not_begun_a_collective_is_behind():
    queued = entry(3, state="scheduled")
    found = told({0: calls(*DONE, WAITS), 1: calls(*DONE, queued)})
    assert (found.kind, found.ranks) == ("hang", (1,))
    assert found.line.endswith("number 3 of group default_pg: the GPU is at something before it")


def test_a_collective_that_all_have_entered_and_none_has_left_is_told_without_a_rank():
    found = told({0: calls(*DONE, WAITS), 1: calls(*DONE, WAITS)})
    assert (found.kind, found.ranks) == ("hang", ())
    assert "all_reduce number 3 of group default_pg, and none has left it" in found.line
    other = {"process_group": ("7", "mesh_dp"), "state": "started"}
    ahead = calls(*DONE, WAITS, entry(1, **other), entry(2, **other))
    also = told({0: ahead, 1: calls(*DONE, WAITS, entry(1, **other))})
    assert also.ranks == (1,), "who is behind tells more"


@pytest.mark.parametrize(
    "other", [entry(3, "broadcast", state="started"), entry(3, state="started", input_sizes=[[8]])]
)
def test_different_collectives_under_one_number_are_a_mismatch(other):
    found = told({0: calls(*DONE, WAITS), 1: calls(*DONE, other), 2: calls(*DONE, WAITS)})
    assert (found.kind, found.ranks) == ("collective-mismatch", (1,))
    assert found.line.startswith("number 3 of group default_pg: rank 1 calls ")
    assert "rank 0 calls all_reduce of [[4]] at /w/train.py:33 in step" in found.line
    two = told({0: calls(*DONE, WAITS), 1: calls(*DONE, other)})
    assert two.ranks == (), "of two, nobody can say which one is wrong"


def test_groups_are_compared_apart_and_sends_not_at_all():
    other = {"process_group": ("7", "mesh_dp")}
    send = entry(9, "send 0->1", is_p2p=True, state="started")
    here = calls(*DONE, entry(5, **other), send)
    assert compare({0: here, 1: calls(*DONE)}) is None, "one rank alone is in that group"
    assert compare({0: here, 1: calls(*DONE, entry(5, **other))}) is None
    apart = {"process_group": ("8", "mesh_dp"), "state": "started"}
    assert compare({0: calls(*DONE, entry(1, **apart)), 1: calls(*DONE, entry(2, **other))}) is None
    found = told({0: calls(*DONE, entry(1, **other), entry(2, state="started", **other)),
                     1: calls(*DONE, entry(1, **other))})  # fmt: skip
    assert "number 2 of group 7:mesh_dp" in found.line


def test_a_rank_that_is_ahead_by_what_it_has_completed_waits_for_nobody():
    assert compare({0: calls(*DONE, entry(3)), 1: calls(*DONE)}) is None
    assert compare({0: calls(*DONE)}) is None
    assert compare({}) is None


def test_the_recorder_forgets_the_oldest_and_numbers_may_have_gaps_and_any_size():
    assert told({0: calls(entry(2), WAITS), 1: calls(*DONE)}).ranks == (1,)
    far = entry(1 << 60)
    assert compare({0: calls(entry(1), far), 1: calls(entry(1), far)}) is None
    found = told({0: calls(*DONE), 1: calls(*DONE, entry(7, state="started"))})
    assert "rank 0 has not entered all_reduce number 7" in found.line


def of_groups(**ranks: str) -> dict[str, Any]:
    """Return what a dump says of its groups, as NCCL's has it."""
    return {
        "pg_config": {
            name: {"name": name, "desc": "default_pg" if name == "0" else "tp", "ranks": one}
            for name, one in ((name.removeprefix("g"), one) for name, one in ranks.items())
        }
    }


def test_a_rank_that_has_recorded_nothing_in_a_group_is_behind_in_it():
    config = of_groups(g0="[0, 1, 2]", g5="[0, 2]")
    waits = entry(1, state="started")
    dumps = {0: calls(waits, **config), 1: calls(**config), 2: calls(waits, **config)}
    found = told(dumps)
    assert (found.kind, found.ranks, found.call) == ("hang", (1,), "all_reduce")
    assert found.line.startswith("rank 1 has not entered all_reduce number 1 of group default_pg")
    apart = {"process_group": ("5", "tp")}
    started = entry(1, record_id=0), entry(1, state="started", **apart)
    dumps = {0: calls(*started, **config), 1: calls(entry(1, record_id=0), **config)}
    found = told(dumps)
    assert (found.ranks, found.awaited) == ((), (2,)), "rank 1 is not in that group"
    assert found.line == (
        "rank 0 waits in all_reduce number 1 of group 5:tp; of rank 2 there is no record here"
    )
    found = told(dumps, asked=[0, 1, 2])
    assert found.ranks == (2,), "rank 2 was asked, and has not answered"
    assert found.line.startswith("rank 2 has recorded nothing of all_reduce number 1 of group 5:tp")
    found = told({**dumps, 2: calls(entry(1, record_id=0), **config)})
    assert found.ranks == (2,)
    assert "of group 5:tp, in which rank 0 waits" in found.line


def test_a_rank_that_may_have_forgotten_its_calls_is_behind_only_where_the_dump_tells_how_far():
    config = of_groups(g0="[0, 1]", g5="[0, 1]")
    apart = {"process_group": ("5", "tp"), "state": "started"}
    here = calls(entry(7, record_id=90), entry(4, **apart), **config)
    there = entry(7, record_id=90)
    unknown = told({0: here, 1: calls(there, **config)})
    assert (unknown.ranks, unknown.awaited) == ((), (1,))
    for last, ranks in ((3, (1,)), (4, None)):
        status = {"pg_status": {"5": {"last_enqueued_collective": last}}}
        found = compare({0: here, 1: calls(there, **config, **status)})
        assert (found.ranks if found else None) == ranks


def of_two_groups(rank: int, first: str, second: str, *, peer: bool = False) -> Dump:
    """Return a dump of a rank that is in two groups, each with a call of the state; "" for none."""
    other = {"process_group": ("5", "tp")}
    begun = [entry(1, record_id=0), *([entry(1, record_id=1, **other)] if rank < 2 else [])]
    begun += [entry(2, state=first)] if first else []
    begun += [entry(2, state=second, **other)] if second else []
    begun += [entry(0, f"recv {rank}<-9", is_p2p=True, state="scheduled")] if peer else []
    groups = {"g0": "[0, 1, 2]", **({"g5": "[0, 1]"} if rank < 2 else {})}
    return calls(*begun, **of_groups(**groups))


def test_who_waits_itself_is_no_cause_and_is_told_where_all_wait():
    """Rank 2 waits for rank 1, which waits for rank 0."""
    idle, in_second = of_two_groups(0, "", ""), of_two_groups(1, "", "started")
    found = told({0: idle, 1: in_second, 2: of_two_groups(2, "started", "")})
    assert (found.ranks, found.awaited) == ((0,), (0, 1))
    found = told({0: of_two_groups(0, "started", ""), 1: in_second})
    assert found.ranks == ()
    assert "rank 1 has not entered all_reduce number 2 of group default_pg" in found.line
    assert "; rank 0 has not entered all_reduce number 2 of group 5:tp" in found.line


def test_a_rank_that_waits_for_a_peer_is_named_only_where_no_other_one_is_behind():
    waits = of_two_groups(2, "started", "")
    alone = {0: of_two_groups(0, "", "", peer=True), 1: of_two_groups(1, "started", ""), 2: waits}
    assert told(alone).ranks == (0,)
    assert told({**alone, 1: of_two_groups(1, "", "")}).ranks == (1,)


def test_groups_of_one_name_and_other_ranks_are_apart():
    """`split_group` gives the rows of a mesh one name."""
    row = {"process_group": ("5", "tp"), "state": "started"}
    first = of_groups(g5="[0, 1]"), of_groups(g5="[2, 3]")
    dumps = {
        **{rank: calls(entry(1, "broadcast", **row), **first[0]) for rank in (0, 1)},
        2: calls(entry(1, **row), **first[1]),
        3: calls(**first[1]),
    }
    found = told(dumps)
    assert (found.kind, found.ranks) == ("hang", (3,))


def test_ranks_that_give_no_record_are_named_where_they_are_few_and_no_other_is_behind():
    config = of_groups(g0="[0, 1, 2]")
    waits, idle = calls(*DONE, WAITS, **config), calls(*DONE, **config)
    every = range(3)
    found = [
        compare({0: waits, 1: waits}, every),
        compare({0: waits, 1: idle}, every),
        compare({0: waits}, every),
        compare({0: waits, 1: waits}, [0, 1]),
    ]
    assert [one.ranks if one else None for one in found] == [(2,), (1,), None, ()]
    two = told({0: calls(*DONE, WAITS, **of_groups(g0="[0, 1]"))}, [0, 1])
    assert two.ranks == (1,)


@pytest.mark.parametrize("odd", [7, [], {"0": 7}, {"0": {"ranks": 7}}, {7: {"ranks": "[x]"}}])
def test_what_a_dump_says_of_its_groups_may_be_anything(odd):
    assert calls(WAITS, pg_config=odd, pg_status=odd) == calls(WAITS)


def nested(depth: int, width: int) -> list[Any]:
    """Return lists in lists; as a text, the widest one has no end."""
    value: list[Any] = [4]
    for _ in range(depth):
        value = [value] * width
    return value


@pytest.mark.parametrize(
    "odd",
    [10**5000, nested(200, 1), nested(60, 2), [[1] * 999] * 999, [[]] * 9999, "x" * 9999],
    ids=["digits", "deep", "doubled", "wide", "many", "long"],
)
def test_a_field_of_any_kind_and_size_is_no_error_and_no_endless_text(odd):
    names = ("collective_seq_id", "input_sizes", "profiling_name", "state")
    fields = [{name: odd} for name in names]
    framed = {"frames": [{"filename": "/w/t.py", "line": odd, "name": odd}]}
    found = calls(*[entry(1, **some) for some in [*fields, framed, {"process_group": (odd,)}]])
    assert len(found.calls) == 5, "one has no number"
    assert all(len(repr(call)) < 5000 for call in found.calls)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_a_dump_that_calls_something_is_refused_and_json_is_read(tmp_path):
    dump = pickle.dumps({"entries": [Evil(tmp_path / "made")]})
    assert read(dump) is None
    assert not (tmp_path / "made").exists()
    as_json = json.dumps({"version": "2.10", "entries": [*DONE, WAITS]}).encode()
    assert read(as_json) == calls(*DONE, WAITS)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\x80\x02", pickle.dumps({"entries": DONE})[:-40], pickle.dumps([1]), b"\x80\x02.",
     pickle.dumps({"entries": {}}), b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f"],
)  # fmt: skip
def test_what_is_no_complete_dump_is_refused(content):
    assert read(content) is None


def test_entries_of_another_shape_are_left_out():
    strange = [7, {}, entry(1, process_group=None), entry(1, collective_seq_id="1")]
    frameless = entry(1, frames=[None, {"filename": 7}])
    assert [call.place for call in calls(*strange, frameless).calls] == [""]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["pickle", "json"])
def test_dumps_of_a_real_recorder_name_the_rank_that_is_behind(tmp_path, way):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [program("recorded_rank"), str(tmp_path), way]
    environ = {**os.environ, "TORCH_FR_BUFFER_SIZE": "2000"}
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=300)
    dumps = {rank: read((tmp_path / f"{rank}").read_bytes()) for rank in (0, 1)}
    found = told({rank: dump for rank, dump in dumps.items() if dump})
    assert found.ranks == (1,)
    at = f" at {program('recorded_rank')}:" if way == "pickle" else ""  # JSON has no frames
    assert f"all_reduce number 4 of group default_pg, in which rank 0 waits{at}" in found.line
