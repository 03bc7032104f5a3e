"""Ranks that train on the same data are named with the loader's line; others hear nothing."""

from __future__ import annotations

import pytest
from cases import few
from ranks import Job, RunRanks, line_of
from repo import source

from saferun.inject.hooks import shard_findings

HEAD = source("inject/data_for_ranks")
TAIL = """
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for epoch in range(2):
    for batch in loader:
        batch = batch[0] if isinstance(batch, (list, tuple)) else batch
        optimizer.zero_grad(); net(batch.float().reshape(-1, 4)).sum().backward(); optimizer.step()
print("done", float(sum(p.sum() for p in net.parameters())), flush=True)
store = dist.distributed_c10d._get_default_store()
store.set(f"end{rank}", "")
store.wait([f"end{one}" for one in range(size)])
"""
STREAM = """
class Stream(IterableDataset):
    def __iter__(self):
        numbers = torch.randn(160, 4)
        return iter(numbers[START])
"""
# Each is a program's way to its data that gives every rank the same.
SAME = {
    "no sampler": "loader = DataLoader(data, 4)  # here",
    "under DDP": "net = DDP(net)\nloader = DataLoader(data, 4)  # here",
    "shuffled with one seed": "loader = DataLoader(data, 4, shuffle=True)  # here",
    "workers": "loader = DataLoader(data, 4, num_workers=1)  # here",
    "sampler of one replica": (
        "sampler = DistributedSampler(data, num_replicas=1, rank=0)\n"
        "loader = DataLoader(data, 4, sampler=sampler)  # here"
    ),
    "stream that is not split": STREAM.replace("START", "::1")
    + "loader = DataLoader(Stream(), 4)  # here",
    "a collated dict": (
        "texts = [dict(ids=torch.full((4,), n)) for n in range(160)]\n"
        "def collate(items): return torch.stack([item['ids'] for item in items])\n"
        "loader = DataLoader(texts, 4, collate_fn=collate)  # here"
    ),
}
DIFFERENT = {
    "distributed sampler": "loader = DataLoader(data, 4, sampler=DistributedSampler(data))",
    "shuffled with seeds of their own": (
        "torch.manual_seed(rank); loader = DataLoader(data, 4, shuffle=True)"
    ),
    "stream split by rank": STREAM.replace("START", "rank::size")
    + "loader = DataLoader(Stream(), 4)",
    "custom sampler": (
        "class Mine(Sampler):\n"
        "    def __iter__(self): return iter(range(rank, 160, size))\n"
        "    def __len__(self): return 80\n"
        "loader = DataLoader(data, 4, sampler=Mine())"
    ),
    "dealt out by the script": "loader = DataLoader(Subset(data, range(rank, 160, size)), 4)",
    "shards of a WebDataset's kind": (
        "class Shards(IterableDataset):\n"
        "    def __init__(self, urls): self.urls = urls\n"
        "    def __iter__(self):\n"
        "        for url in self.urls:\n"
        "            torch.manual_seed(url); yield from torch.randn(20, 4)\n"
        "loader = DataLoader(Shards(list(range(8))[rank::size]), 4)"
    ),
}
MEANT = {
    "synthetic": "loader = DataLoader(TensorDataset(torch.ones(160, 4)), 4)",
    "one batch again and again": "loader = [b for b in DataLoader(data, 4)][:1] * 60",
    "one batch repeated by the loader": (
        "loader = DataLoader(TensorDataset(torch.arange(4.).repeat(160, 1)), 4)"
    ),
    "batch larger than the data": "loader = DataLoader(data, 200)",
    "no batch at all": "loader = DataLoader(TensorDataset(torch.ones(0, 4)), 4)",
    "tensor parallel": (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))\n"
        "loader = DataLoader(data, 4)"
    ),
    "validation between steps": (
        "train = DataLoader(data, 4, sampler=DistributedSampler(data))\n"
        "valid = DataLoader(data, 4)\n"
        "for batch in valid: net(batch[0])\n"
        "loader = train"
    ),
    "rank 0 reads and sends": (
        "def batches():\n"
        "    mine = iter(DataLoader(data, 4)) if rank == 0 else None\n"
        "    for _ in range(40):\n"
        "        batch = next(mine)[0] if rank == 0 else torch.empty(4, 4)\n"
        "        dist.broadcast(batch, 0); yield batch\n"
        "loader = list(batches())"
    ),
    "a generator": "loader = (torch.randn(4, 4) for _ in range(40))",
}
WARN = {"shards": "warn"}


def train(run_ranks: RunRanks, body: str, setting: str = "warn") -> Job:
    return run_ranks(HEAD + body + TAIL, shards=setting)


@pytest.mark.parametrize("body", few(SAME, "under DDP"))
def test_ranks_with_the_same_data_are_named_once_with_the_loaders_line(
    run_ranks: RunRanks, body: str
) -> None:
    job = train(run_ranks, body)
    (line,) = job.messages()
    place = f"train.py:{line_of(HEAD + body, '# here')}"
    assert f"{place}: ranks 0, 1 of 2 train on the same batches" in line
    assert (job.code, job.out.count("done")) == (0, 2), job.err


@pytest.mark.parametrize("body", few({**DIFFERENT, **MEANT}, "distributed sampler"))
def test_no_other_is(run_ranks: RunRanks, body: str) -> None:
    job = train(run_ranks, body)
    assert (job.messages(), job.code, job.out.count("done")) == ([], 0, 2), job.err


@pytest.mark.slow
def test_under_error_the_job_ends_at_the_users_line(run_ranks: RunRanks) -> None:
    job = train(run_ranks, SAME["no sampler"], "error")
    assert job.code == 1
    assert "RuntimeError: " in job.err
    assert "shards.py" not in job.err.split("RuntimeError: ")[0]


# the pure part


def fingerprints(*letters: str) -> dict[int, str]:
    return {rank: f"{letter}1 {letter}2 {letter}3" for rank, letter in enumerate(letters)}


@pytest.mark.parametrize(
    ("letters", "ranks", "names", "expected"),
    [
        ("aabb", [[0, 1], [2, 3]], ("dp", "tp"), []),
        ("aaaa", [[0, 1], [2, 3]], ("dp", "tp"), [0, 2]),
        ("aabb", [[0, 1], [2, 3]], ("dp_replicate", "dp_shard"), [0, 1]),
        ("abab", [[0, 1], [2, 3]], ("pp", "dp"), []),
        ("aaaa", [0, 1, 2, 3], (None,), [0, 1, 2, 3]),
        ("aaaa", [0, 1, 2, 3], ("tp",), []),
        ("aaaa", [[0, 1], [2, 3]], (None, None), []),
        ("abcd", [0, 1, 2, 3], (None,), []),
    ],
)
def test_ranks_that_differ_in_model_dimensions_alone_may_share(
    letters: str, ranks: list, names: tuple, expected: list[int]
) -> None:
    found = shard_findings.mesh(ranks, names)
    assert shard_findings.same(fingerprints(*letters), [found], []) == expected


def test_ranks_of_a_group_of_the_scripts_own_may_share() -> None:
    texts = fingerprints(*"aabb")
    assert shard_findings.same(texts, [], [{0, 1}, {2, 3}]) == []
    assert shard_findings.same(texts, [], [{0, 2}, {1, 3}]) == [0, 1]


@pytest.mark.parametrize(
    ("prints", "tells"),
    [(["a", "b", "c"], True), (["a", "b", None], False), (["a", "a", "a"], False)],
)
def test_batches_that_tell_nothing_are_published_as_nothing(prints: list, tells: bool) -> None:
    assert bool(shard_findings.encode(prints)) is tells
    assert shard_findings.same({0: "", 1: ""}, [], []) == []


def test_in_a_large_job_a_rank_looks_at_few_others() -> None:
    assert shard_findings.peers(3, 8) == list(range(8))
    assert len(shard_findings.peers(3, 4096)) < 16
    assert 4 in shard_findings.peers(3, 4096)
