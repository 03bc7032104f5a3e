"""Dumps of torch's flight recorder of 16 ranks of Megatron that hang, as NVIDIA's public traces.

Those are pickles beside the tests of nvidia-resiliency-ext (tests/attribution/unit/fr_traces), of
which the text says which ranks were struck, what the groups are, and which ranks are missing where
(https://github.com/NVIDIA/nvidia-resiliency-ext). These are made: ranks carry out their collectives
in order, those that are struck stop, and what the others have recorded by then is dumped with the
fields that torch 2.13 writes for NCCL (FlightRecorder.hpp).
"""

import pickle
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

SIZE, STAGE = 16, 8  # ranks; of a stage of the pipeline
_KEPT = 30  # entries of a rank that its recorder keeps
_STEPS = 6


class Op(NamedTuple):
    """What a rank calls next."""

    name: str
    group: str
    ranks: tuple[int, ...]
    is_p2p: bool = False


class Layout(NamedTuple):
    """How many ranks are in a group."""

    tensor: int
    expert: int


class Trace(NamedTuple):
    """One of the four."""

    struck: tuple[int, ...]
    layout: Layout
    fails_at: str  # the group whose collective those that are struck do not enter
    is_empty: bool  # they hold the GIL, and record nothing


TRACES = {
    "gpu_error_1st": Trace((12, 14), Layout(2, 4), "EXPERT_MODEL_PARALLEL_GROUP", False),
    "gpu_error_2nd": Trace((9, 14), Layout(4, 8), "TENSOR_MODEL_PARALLEL_GROUP", False),
    "lock_gil_1st": Trace((9, 14), Layout(4, 8), "EXPERT_MODEL_PARALLEL_GROUP", True),
    "lock_gil_2nd": Trace((9, 14), Layout(4, 8), "TENSOR_MODEL_PARALLEL_GROUP", True),
}


def _row(rank: int, size: int) -> tuple[int, ...]:
    return tuple(range(rank // size * size, rank // size * size + size))


def _step(rank: int, layout: Layout) -> Iterator[Op]:
    """Yield what a rank calls in one step."""
    tensor = ("TENSOR_MODEL_PARALLEL_GROUP", _row(rank, layout.tensor))
    expert = ("EXPERT_MODEL_PARALLEL_GROUP", _row(rank, layout.expert))
    first = rank < STAGE
    pair = (rank % STAGE, rank % STAGE + STAGE)
    there = Op("send" if first else "recv", "PIPELINE_MODEL_PARALLEL_GROUP", pair, True)
    back = there._replace(name="recv" if first else "send")
    layer = [Op("all_reduce", *tensor), Op("all_to_all", *expert), Op("all_to_all", *expert)]
    yield from [*layer, there, back] if first else [there, *layer, *layer, back]
    yield Op("reduce_scatter", "DATA_PARALLEL_GROUP_WITH_CP", _row(rank, layout.expert))
    yield Op("all_reduce", "default_pg", tuple(range(SIZE)))


class _Rank:
    """One rank: what it has called, in order, and which of it has come to its end."""

    def __init__(self, rank: int, trace: Trace) -> None:
        self.rank, self.trace = rank, trace
        self.todo = [op for _ in range(_STEPS) for op in _step(rank, trace.layout)]
        self.called: list[tuple[Op, int]] = []  # with its number in the group
        self.done: set[int] = set()  # places in `called`
        if rank in trace.struck:
            half = len(self.todo) // 2
            ops = enumerate(self.todo)
            at = next(at for at, op in ops if at > half and op.group == trace.fails_at)
            del self.todo[at:]

    def call(self, ahead: int) -> bool:
        """Call the next one; unless so many others have not ended."""
        if not self.todo or len(self.called) - len(self.done) > ahead:
            return False
        op = self.todo.pop(0)
        number = sum(one.group == op.group for one, _ in self.called) + 1
        self.called.append((op, number))
        return True


def _complete(ranks: list[_Rank]) -> None:
    """End what all have called and what is the first that each has not ended."""
    first = {
        one.rank: at
        for one in ranks
        if (at := next((n for n in range(len(one.called)) if n not in one.done), None)) is not None
    }
    heads = {rank: ranks[rank].called[at] for rank, at in first.items()}
    for rank, (op, number) in heads.items():
        mates = [heads.get(one) for one in op.ranks]
        if all(mate and mate[0].ranks == op.ranks and mate[1] == number for mate in mates):
            ranks[rank].done.add(first[rank])


def _dump(one: _Rank, groups: Mapping[str, str], *, has_config: bool) -> bytes:
    is_empty = one.trace.is_empty and one.rank in one.trace.struck
    status: dict[str, dict[str, int]] = {}
    entries = []
    for at, (op, number) in enumerate(one.called):
        name, peer_to_peer = groups[op.group], op.is_p2p
        state = "completed" if at in one.done else "scheduled"
        to = next((rank for rank in op.ranks if rank != one.rank), 0)
        arrow = f" {one.rank}{'->' if op.name == 'send' else '<-'}{to}" if peer_to_peer else ""
        entries.append(
            {
                **{"record_id": at, "pg_id": int(name), "process_group": (name, op.group)},
                **{"collective_seq_id": 0 if peer_to_peer else number, "op_id": at + 1},
                **{"p2p_seq_id": number if peer_to_peer else 0, "is_p2p": peer_to_peer},
                **{"profiling_name": f"nccl:{op.name}{arrow}", "state": state, "retired": False},
                **{"input_sizes": [[4, 1024]], "input_dtypes": ["BFloat16"], "timeout_ms": 600000},
                **{"output_sizes": [[4, 1024]], "output_dtypes": ["BFloat16"]},
                **{"time_created_ns": at, "time_discovered_started_ns": None},
                **{"time_discovered_completed_ns": at if state == "completed" else None},
                **{"thread_id": "1", "thread_name": "python", "frames": []},
            }
        )
        ended = status.get(name, {}).get("last_completed_collective", 0)
        status[name] = {
            "last_enqueued_collective": number,
            "last_started_collective": number,
            "last_completed_collective": number if state == "completed" else ended,
        }
    config = {
        groups[op.group]: {"name": groups[op.group], "desc": op.group, "ranks": str([*op.ranks])}
        for op, _ in one.called
    }
    whole: dict[str, Any] = {"version": "2.10", "comm_lib_version": "2.28.9"}
    whole["pg_config"] = config if has_config or not is_empty else {}
    whole["pg_status"] = {} if is_empty else status
    whole["entries"] = [] if is_empty else entries[-_KEPT:]
    return pickle.dumps(whole, protocol=2)


def dumps(trace: Trace, *, ahead: int, has_config: bool) -> dict[int, bytes]:
    """Return rank -> its dump.

    Args:
        trace: which one.
        ahead: how many collectives a rank calls before others have ended, as NCCL lets it.
        has_config: a dump without entries names the rank's groups.
    """
    names = dict.fromkeys(["default_pg", *(op.group for op in _step(0, trace.layout))])
    groups = {name: str(at) for at, name in enumerate(names)}
    ranks = [_Rank(rank, trace) for rank in range(SIZE)]
    while _advance(ranks, ahead):
        pass
    return {one.rank: _dump(one, groups, has_config=has_config) for one in ranks}


def _advance(ranks: Collection[_Rank], ahead: int) -> bool:
    every = list(ranks)
    before = sum(len(one.done) for one in every)
    called = [one.call(ahead) for one in every]
    _complete(every)
    return any(called) or sum(len(one.done) for one in every) > before
