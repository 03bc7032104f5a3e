"""What `order` promises: things made in a harmful order are said once, with the user's line."""

import pytest
from cases import few, slow
from ranks import line_of
from repo import source

from saferun.inject.hooks.order import order_findings

HEAD = source("inject/loaders_and_group")
TAIL = "finish()\n"
EARLY = f"""{HEAD}
def make_loader():
    return DataLoader(  # here
        data, batch_size=2)
loader = make_loader()
dist.init_process_group("gloo")
late = make_loader()
{TAIL}"""


def test_a_loader_made_before_the_group_is_reported_once_with_the_users_line(run_ranks, tmp_path):
    job = run_ranks(EARLY)
    place = f"{tmp_path}/train.py:{line_of(EARLY, '# here')}"
    assert [
        line for line in job.messages() if line.startswith(f"saferun: {place}: DataLoader made")
    ]
    assert len(job.messages()) == 1
    assert (job.code, job.out.count("done")) == (0, 2)


def test_under_error_the_same_finding_is_raised_where_the_group_is_made(run_ranks, tmp_path):
    job = run_ranks(EARLY, order={"mode": "error"})
    place = f"{tmp_path}/train.py:{line_of(EARLY, '# here')}"
    assert f"RuntimeError: {place}: DataLoader made before init_process_group" in job.err
    assert (job.code, job.out) == (1, "")


@pytest.mark.parametrize(("mode", "ranks"), [("warn", 1), *slow(("off", 2))])
def test_one_rank_alone_gets_no_message_and_off_is_off(run_ranks, mode, ranks):
    job = run_ranks(EARLY, ranks=ranks, order={"mode": mode})
    assert (job.code, job.messages()) == (0, [])


def test_a_shuffling_sampler_made_before_and_used_after_is_reported_with_its_line(run_ranks):
    script = HEAD + (
        "sampler = RandomSampler(data)  # here\n"
        "dist.init_process_group('gloo')\n"
        "loader = DataLoader(data, sampler=sampler)\n"
        "again = DataLoader(data, sampler=sampler)\n" + TAIL
    )
    job = run_ranks(script)
    assert len(job.messages()) == 1
    assert job.messages(f"train.py:{line_of(script, '# here')}: RandomSampler made before")


SILENT = {
    "loader-after-the-group": "dist.init_process_group('gloo'); loader = DataLoader(data)",
    "loader-with-its-own-ranks": (
        "loader = DataLoader(data, sampler=DistributedSampler(data, size, rank))\n"
        "dist.init_process_group('gloo')"
    ),
    "batches-that-know-their-rank": (
        "class Mine(BatchSampler):\n"
        "    def __init__(self, inner): super().__init__(inner, 2, False); self.rank = rank\n"
        "loader = DataLoader(data, batch_sampler=Mine(SequentialSampler(data)))\n"
        "dist.init_process_group('gloo')"
    ),
    "sampler-inside-batches": (
        "inner = DistributedSampler(data, size, rank)\n"
        "loader = DataLoader(data, batch_sampler=BatchSampler(inner, 2, False))\n"
        "dist.init_process_group('gloo')"
    ),
    "iterable-dataset": (
        "class Mine(IterableDataset):\n"
        "    def __iter__(self): return iter(range(rank, 8, size))\n"
        "loader = DataLoader(Mine())\n"
        "dist.init_process_group('gloo')"
    ),
    "data-dealt-out-by-the-script": (
        "loader = DataLoader(torch.utils.data.Subset(data, range(rank, 8, size)))\n"
        "dist.init_process_group('gloo')"
    ),
    "tensors-dealt-out-by-the-script": (
        "loader = DataLoader(TensorDataset(torch.arange(8.0)[rank::size]))\n"
        "dist.init_process_group('gloo')"
    ),
    "a-list-dealt-out-by-the-script": (
        "loader = DataLoader(list(range(8))[rank::size])\ndist.init_process_group('gloo')"
    ),
    "files-dealt-out-by-the-script": (
        "class Files(Dataset):\n"
        "    def __init__(self): self.files = [f'{n}.bin' for n in range(rank, 8, size)]\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, n): raise OSError('nobody asks for a sample')\n"
        "loader = DataLoader(Files())\n"
        "dist.init_process_group('gloo')"
    ),
    "loader-thrown-away": (
        "mean = sum(x.mean() for x, in DataLoader(data)) / 8\ndist.init_process_group('gloo')"
    ),
    "no-group-ever": "loader = DataLoader(data)\nlist(loader)",
    "loader-in-a-loaders-worker": (
        "kept = []\n"
        "class Mine(Dataset):\n"
        "    def __len__(self): return 2\n"
        "    def __getitem__(self, n): kept.append(DataLoader(data)); return n\n"
        "dist.init_process_group('gloo')\n"
        "list(DataLoader(Mine(), num_workers=1, multiprocessing_context='fork'))"
    ),
    "ddp-then-compile": (
        "dist.init_process_group('gloo')\n"
        "net = torch.compile(DDP(torch.nn.Linear(2, 2)), backend='eager')"
    ),
    "compiled-blocks-inside-ddp": (
        "dist.init_process_group('gloo')\n"
        "net = DDP(torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend='eager')))"
    ),
}


@pytest.mark.parametrize("body", few(SILENT, "loader-after-the-group", "loader-with-its-own-ranks"))
def test_no_other_is_reported(run_ranks, body):
    job = run_ranks(HEAD + body + "\n" + TAIL)
    assert (job.code, job.out.count("done"), job.messages()) == (0, 2, [])


def test_a_group_that_a_library_makes_may_shard_loaders_afterwards(run_ranks, tmp_path):
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "trainer.py").write_text(
        "import torch.distributed as dist\ndef fit(loader): dist.init_process_group('gloo')\n",
        encoding="utf-8",
    )
    script = HEAD + "import sys; sys.path.append('site-packages')\nimport trainer\n"
    script += "loader = DataLoader(data)\ntrainer.fit(loader)\nmore = DataLoader(data)\n" + TAIL
    job = run_ranks(script)
    assert (job.code, job.messages()) == (0, [])


# DDP


def test_a_compiled_model_in_ddp_is_reported_once_with_the_line(run_ranks):
    script = HEAD + (
        "dist.init_process_group('gloo')\n"
        "net = torch.compile(torch.nn.Linear(2, 2), backend='eager')\n"
        "net = DDP(net)  # here\n"
        "net(torch.ones(2)).sum().backward()\n" + TAIL
    )
    job = run_ranks(script)
    assert len(job.messages()) == 1
    assert job.messages(f"train.py:{line_of(script, '# here')}: DDP wraps a compiled model")
    assert job.code == 0


def test_a_model_on_the_first_gpu_under_another_local_rank_is_wrong():
    wrong = order_findings.on_wrong_device
    assert wrong("nccl", "1", 2, {"cuda:0"})
    assert wrong("cpu:gloo,cuda:nccl", "3", 8, {"cuda:0"})
    assert not wrong("nccl", "0", 2, {"cuda:0"})  # it is its own
    assert not wrong("nccl", "1", 1, {"cuda:0"})  # one visible device
    assert not wrong("nccl", "1", 2, {"cuda:0", "cuda:1"})  # spread over devices
    assert not wrong("gloo", "1", 2, {"cuda:0"})
    assert not wrong("nccl", None, 2, {"cuda:0"})


# The barrier after wrapping

WRAPS = {
    "ddp": "DDP(torch.nn.Linear(2, 2))",
    "fsdp1": "FSDP(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),"
    " device_id=torch.device('cpu'), auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}))",
    "fsdp2": "shard_all(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), mesh)",
    "fsdp2, torch 2.4's name": "shard_all(torch.nn.Sequential(torch.nn.Linear(2, 2),"
    " torch.nn.Linear(2, 2)), mesh, old_fully_shard())",
}
WRAP_HEAD = HEAD + source("inject/wrap_and_meet")


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_no_rank_leaves_the_wrap_before_all_have_wrapped(run_ranks, wrap):
    script = WRAP_HEAD + "dist.init_process_group('gloo')\n"
    if "FSDP(" in wrap or "shard_all" in wrap:
        script += "mesh = init_device_mesh('cpu', (size,))\n"
    script += f"slowly(lambda: {wrap})\n" + TAIL
    job = run_ranks(script)
    assert (job.code, job.messages()) == (0, [])
    waits = [line for line in job.out.splitlines() if line.startswith("rank 0 has")]
    assert len(waits) == 1, "one barrier for one model, however many parts are wrapped"
    assert waits == ["rank 0 has wrapped: False"]


def test_wrap_barrier_off_meets_nobody(run_ranks):
    script = WRAP_HEAD + "dist.init_process_group('gloo')\n"
    script += f"slowly(lambda: {WRAPS['ddp']})\n" + TAIL
    job = run_ranks(script, order={"wrap_barrier": False})
    assert job.code == 0
    assert "rank 0 has wrapped" not in job.out


def test_only_the_ranks_of_the_models_own_group_meet(run_ranks):
    script = HEAD + (
        "dist.init_process_group('gloo')\n"
        "group = dist.new_group([1, 2])\n"
        "if rank in (1, 2): DDP(torch.nn.Linear(2, 2), process_group=group)\n" + TAIL
    )
    job = run_ranks(script, ranks=3)
    assert (job.code, job.messages()) == (0, [])


def test_a_group_of_the_scripts_own_making_is_left_alone(run_ranks):
    """As torchft makes them: torch's own tables do not know such a group."""
    script = HEAD + source("inject/own_group")
    script += (
        "dist.init_process_group('gloo')\n"
        "net = DDP(torch.nn.Linear(2, 2), process_group=Mine(dist.group.WORLD))\n" + TAIL
    )
    job = run_ranks(script)
    assert (job.code, job.messages(), job.out.count("done")) == (0, [], 2)


def test_a_rank_that_never_shards_costs_one_bounded_wait_and_no_message(run_ranks):
    """Nor does torch say anything: fully_shard needs no other rank."""
    script = WRAP_HEAD + (
        "barriers.TIMEOUT_S = 1\n"
        "dist.init_process_group('gloo')\n"
        "meet, met = meetings.meet, []\n"
        "meetings.meet = lambda *a: met.append(1) or meet(*a)\n"
        "mesh = init_device_mesh('cpu', (size,))\n"
        "make = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "if rank != 1:\n"
        "    for _ in range(3):\n"
        "        net = make(); fully_shard(net[0], mesh=mesh); fully_shard(net, mesh=mesh)\n"
        "    assert fully_shard.state(net) is not None\n"  # what torch hangs on it
        "    print(f'waits {len(met)} ', flush=True)\n" + TAIL
    )
    job = run_ranks(script, ranks=3)
    assert (job.code, job.messages()) == (0, [])
    assert job.out.count("waits 1 ") == 2, job.out


# fix

ASKS = f"""{HEAD}
print(f"asked {{dist.is_initialized()}}", flush=True)
loader = DataLoader(data, sampler=DistributedSampler(data) if dist.is_initialized() else None)
print(f"batches {{len(loader)}}", flush=True)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
"""
FIX = ASKS + TAIL


def test_fix_makes_the_group_when_it_is_first_asked_for(run_ranks):
    job = run_ranks(FIX, order={"mode": "fix"})
    assert (job.code, job.messages()) == (0, [])
    assert (job.out.count("asked True"), job.out.count("batches 4")) == (2, 2)


def test_without_fix_the_same_script_reads_all_data_on_every_rank(run_ranks):
    job = run_ranks(FIX)
    assert (job.out.count("asked False"), job.out.count("batches 8")) == (2, 2)
    assert len(job.messages("DataLoader made before")) == 1


def test_fix_makes_the_group_at_the_first_loader_too(run_ranks):
    script = HEAD + "loader = DataLoader(data)\nassert dist.GroupMember.WORLD is not None\n" + TAIL
    script = script.replace("dist.GroupMember", "dist.distributed_c10d.GroupMember")
    job = run_ranks(script, order={"mode": "fix"})
    assert (job.code, job.messages()) == (0, [])


def test_fix_accepts_the_scripts_own_init_once(run_ranks):
    script = ASKS + "dist.init_process_group('gloo')\n" + TAIL
    job = run_ranks(script, order={"mode": "fix"})
    assert job.code == 1
    assert "trying to initialize the default process group twice" in job.err


OTHERS = {"world": "'gloo', rank=1 - rank, world_size=3", "backend": "'mpi'"}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_fix_refuses_another_group_than_the_one_it_made(run_ranks, other):
    script = FIX.replace('("gloo")', f"({other})")
    job = run_ranks(script, order={"mode": "fix"})
    assert job.code == 1
    assert "RuntimeError: init_process_group asks for another group than hooks.order" in job.err
    assert "set it to warn for this script" in job.err


def test_fix_makes_no_group_in_helpers_of_a_rank(run_ranks):
    script = HEAD + (
        "import subprocess, sys\n"
        "code = 'import torch.distributed as d; print(f\"helper {d.is_initialized()}\")'\n"
        "if rank == 0: subprocess.run([sys.executable, '-c', code], check=True)\n" + TAIL
    )
    job = run_ranks(script, order={"mode": "fix"})
    assert (job.code, job.out.count("helper False")) == (0, 1)


def test_fix_makes_no_group_for_a_single_process(run_ranks):
    script = HEAD + "loader = DataLoader(data)\nprint('asked', dist.is_initialized())\n"
    alone = dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    job = run_ranks(script, ranks=1, environ=alone, order={"mode": "fix"})
    assert (job.code, job.out) == (0, "asked False\n")
