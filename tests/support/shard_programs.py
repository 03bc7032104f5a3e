"""Programs that train, by the shape of their way to data.

benchmarks/shard_libraries.py has those that need libraries which the tests do without.
"""

from repo import source
from shard_program import fine, same

STREAM = """
class Stream(IterableDataset):
    def __init__(self, start=0, step=1): self.start, self.step = start, step
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        start, step = self.start, self.step
        if worker is not None: start, step = start + step * worker.id, step * worker.num_workers
        return iter(torch.randn(320, 4, generator=torch.Generator().manual_seed(5))[start::step])
"""
ACCELERATE = "from accelerate import Accelerator\naccelerator = Accelerator(cpu=True)\n"
GROUPS = """
class Repeat(Sampler):  # a group of samples goes to all ranks, as prompts in GRPO
    def __iter__(self):
        for first in range(0, 160, 4):
            for _ in range(size): yield from range(first, first + 4)
    def __len__(self): return 160 * size
"""
MESH = (
    "from torch.distributed.device_mesh import init_device_mesh\n"
    "mesh = init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp_shard', 'tp'))\n"
    "from torch.distributed.fsdp import fully_shard\n"
    "net = fully_shard(net, mesh=mesh['dp_shard'])\n"
)
FSDP = (
    "from torch.distributed.fsdp import FullyShardedDataParallel\n"
    "net = FullyShardedDataParallel(net, device_id=torch.device('cpu'))\n"
)
WEB = """
class WebLike(IterableDataset):  # shards, of which each node takes its own, then each worker
    def __init__(self, urls, splitter): self.urls, self.splitter = urls, splitter
    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        urls = self.splitter(self.urls)
        if worker is not None: urls = urls[worker.id :: worker.num_workers]
        for url in urls:
            content = torch.randn(20, 4, generator=torch.Generator().manual_seed(url))
            for n, row in enumerate(content): yield {"__key__": f"{url}-{n}", "row": row}
def rows(samples): return torch.stack([sample["row"] for sample in samples])
"""
STREAMING = """
class StreamingLike(IterableDataset):  # knows its place among all workers of all ranks
    def __init__(self, place, places): self.place, self.places, self.epoch = place, places, 0
    def __iter__(self):
        order = torch.randperm(320, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1
        for n in order[self.place :: self.places]: yield torch.full((4,), float(n))
    def __len__(self): return 320 // self.places
"""
TRAINER = """
class Trainer:
    def __init__(self, model, train_dataset, batch=4):
        self.model, self.data, self.batch = model, train_dataset, batch
    def sampler(self): return DistributedSampler(self.data) if SHARD else RandomSampler(self.data)
    def get_train_dataloader(self):
        return DataLoader(self.data, self.batch, sampler=self.sampler(), num_workers=0)  # here
trainer = Trainer(DDP(net), data)
net, loader = trainer.model, trainer.get_train_dataloader()
"""
TITAN = source("inject/torchtitan_loader")
NANOCHAT = """
def batches(start, step):  # tokens of row groups, as a generator without a DataLoader
    rows = torch.randint(0, 99, (320, 4), generator=torch.Generator().manual_seed(3))
    for place in range(start * 4, 320, step * 4): yield rows[place : place + 4]
"""
SAMPLED = "loader = DataLoader(data, 4, sampler=DistributedSampler(data))"
PLAIN = "loader = DataLoader(data, 4, shuffle=True)  # here"
LOADERLESS = "a generator is no DataLoader, and is not seen"

PROGRAMS = [
    # DDP and FSDP
    fine("DDP", "distributed sampler", "net = DDP(net)\n" + SAMPLED),
    same("DDP", "no sampler", "net = DDP(net)\nloader = DataLoader(data, 4)  # here"),
    same("DDP", "shuffled with one seed", PLAIN),
    fine("DDP", "shuffled with own seeds", "torch.manual_seed(rank)\n" + PLAIN),
    same("DDP", "workers", "loader = DataLoader(data, 4, num_workers=1)  # here"),
    same(
        "DDP",
        "sampler of one replica",
        "sampler = DistributedSampler(data, num_replicas=1, rank=0)\n"
        "loader = DataLoader(data, 4, sampler=sampler)  # here",
    ),
    same(
        "DDP",
        "collated dicts",
        "texts = [dict(ids=torch.full((4,), n)) for n in range(160)]\n"
        "def collate(items): return torch.stack([item['ids'] for item in items])\n"
        "loader = DataLoader(texts, 4, collate_fn=collate)  # here",
    ),
    fine(
        "DDP",
        "dealt out by the script",
        "loader = DataLoader(Subset(data, range(rank, 160, size)), 4)",
    ),
    fine(
        "DDP",
        "ranks with other numbers of batches",
        "mine = range(0, 60) if rank else range(60, 160)\n"
        "loader = DataLoader(Subset(data, mine), 4)",
    ),
    fine("FSDP", "distributed sampler", FSDP + SAMPLED),
    same("FSDP", "no sampler", FSDP + PLAIN),
    fine("FSDP2", "distributed sampler", MESH + SAMPLED, ranks=4),
    fine(
        "FSDP2 + TP",
        "sampler of the data dimension",
        MESH + "sampler = DistributedSampler(data, 2, mesh.get_local_rank('dp_shard'))\n"
        "loader = DataLoader(data, 4, sampler=sampler)",
        ranks=4,
    ),
    same("FSDP2 + TP", "no sampler", MESH + PLAIN, ranks=4),
    fine(
        "TP",
        "all ranks read the same",
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (1, 2), mesh_dim_names=('dp', 'tp'))\n" + PLAIN,
    ),
    fine(
        "PP",
        "all ranks read the same",
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cpu', (2,), mesh_dim_names=('pp',))\n" + PLAIN,
    ),
    fine(
        "CP by groups of its own",
        "ranks of a group share",
        "groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]\n"
        "sampler = DistributedSampler(data, 2, rank // 2)\n"
        "loader = DataLoader(data, 4, sampler=sampler)",
        ranks=4,
    ),
    # trainers
    fine("HF Trainer's shape", "sharded", TRAINER.replace("SHARD", "True")),
    same("HF Trainer's shape", "not sharded", TRAINER.replace("SHARD", "False")),
    # streams
    fine(
        "torchtitan's shape",
        "dataset by data rank",
        TITAN + "loader = first(ParallelAware(HuggingFaceText(rank, size), rank, size, 4))",
    ),
    same(
        "torchtitan's shape",
        "dataset of rank 0 everywhere",
        TITAN + "loader = first(ParallelAware(HuggingFaceText(0, 1), rank, size, 4))  # here",
    ),
    fine("nanochat's shape", "by rank", NANOCHAT + "loader = list(batches(rank, size))"),
    same(
        "nanochat's shape",
        "not by rank",
        NANOCHAT + "loader = list(batches(0, 1))",
        known=LOADERLESS,
    ),
    fine("IterableDataset", "split", STREAM + "loader = DataLoader(Stream(rank, size), 4)"),
    fine(
        "IterableDataset",
        "split, with workers",
        STREAM + "loader = DataLoader(Stream(rank, size), 4, num_workers=2)",
    ),
    same("IterableDataset", "not split", STREAM + "loader = DataLoader(Stream(), 4)  # here"),
    same(
        "IterableDataset",
        "split by worker alone",
        STREAM + "loader = DataLoader(Stream(), 4, num_workers=2)  # here",
    ),
    fine(
        "WebDataset's shape",
        "split by node",
        WEB + "urls = WebLike(list(range(16)), lambda urls: urls[rank::size])\n"
        "loader = DataLoader(urls, 4, collate_fn=rows, num_workers=2)",
    ),
    same(
        "WebDataset's shape",
        "not split by node",
        WEB + "urls = WebLike(list(range(16)), lambda urls: urls)\n"
        "loader = DataLoader(urls, 4, collate_fn=rows, num_workers=2)  # here",
    ),
    fine(
        "MosaicML streaming's shape",
        "knows its rank",
        STREAMING + "loader = DataLoader(StreamingLike(rank, size), 4)",
    ),
    same(
        "MosaicML streaming's shape",
        "thinks it is alone",
        STREAMING + "loader = DataLoader(StreamingLike(0, 1), 4)  # here",
    ),
    # samplers
    fine(
        "custom sampler",
        "by rank",
        "class Mine(Sampler):\n"
        "    def __iter__(self): return iter(range(rank, 160, size))\n"
        "    def __len__(self): return 80\n"
        "loader = DataLoader(data, 4, sampler=Mine())",
    ),
    fine(
        "custom batch sampler",
        "by rank",
        "class Mine(Sampler):\n"
        "    def __iter__(self):\n"
        "        for n in range(rank, 40, size): yield list(range(4 * n, 4 * n + 4))\n"
        "loader = DataLoader(data, batch_sampler=Mine())",
    ),
    same(
        "custom sampler",
        "one seed everywhere",
        "class Mine(Sampler):\n"
        "    def __iter__(self):\n"
        "        generator = torch.Generator().manual_seed(9)\n"
        "        return iter(torch.randperm(160, generator=generator).tolist())\n"
        "    def __len__(self): return 160\n"
        "loader = DataLoader(data, 4, sampler=Mine())  # here",
    ),
    # the same data, as it is meant
    fine(
        "validation",
        "a loop of its own",
        SAMPLED + "\nfor batch in DataLoader(data, 4): net(batch[0])",
    ),
    fine(
        "validation",
        "one batch after each step",
        "train = DataLoader(data, 4, sampler=DistributedSampler(data))\n"
        "valid = DataLoader(data, 4)\n"
        "def mixed():\n"
        "    checks = iter(valid)\n"
        "    for batch in train:\n"
        "        yield batch\n"
        "        with torch.no_grad(): net(next(checks)[0])\n"
        "loader = mixed()",
    ),
    fine(
        "broadcast batches",
        "rank 0 reads and sends",
        "def batches():\n"
        "    mine = iter(DataLoader(data, 4)) if rank == 0 else None\n"
        "    for _ in range(40):\n"
        "        batch = next(mine)[0] if rank == 0 else torch.empty(4, 4)\n"
        "        dist.broadcast(batch, 0); yield batch\n"
        "loader = list(batches())",
    ),
    fine("synthetic", "constant", "loader = DataLoader(TensorDataset(torch.ones(160, 4)), 4)"),
    fine(
        "synthetic",
        "one batch again and again",
        "loader = DataLoader(TensorDataset(torch.arange(4.).repeat(160, 1)), 4)",
    ),
    fine(
        "synthetic",
        "random, one seed, for a benchmark",
        "loader = DataLoader(TensorDataset(torch.rand(160, 4)), 4)",
        known="random data of one seed look like data",
    ),
    fine("little data", "a batch larger than the data", "loader = DataLoader(data, 200)"),
    fine("little data", "five batches", "loader = DataLoader(Subset(data, range(20)), 4)"),
    fine("little data", "none", "loader = DataLoader(TensorDataset(torch.ones(0, 4)), 4)"),
    fine(
        "overfitting",
        "one batch kept",
        "loader = [batch for batch in DataLoader(data, 4)][:1] * 60",
    ),
    # real libraries
    fine(
        "accelerate",
        "prepared",
        ACCELERATE + "loader = DataLoader(data, 4, shuffle=True)\n"
        "net, loader = accelerator.prepare(net, loader)",
        needs="accelerate",
    ),
    fine(
        "accelerate",
        "split batches",
        "from accelerate import Accelerator, DataLoaderConfiguration as C\n"
        "accelerator = Accelerator(cpu=True, dataloader_config=C(split_batches=True))\n"
        "loader = accelerator.prepare(DataLoader(data, 4))",
        needs="accelerate",
    ),
    fine(
        "accelerate",
        "rank 0 reads and dispatches",
        "from accelerate import Accelerator, DataLoaderConfiguration as C\n"
        "accelerator = Accelerator(cpu=True, dataloader_config=C(dispatch_batches=True))\n"
        "loader = accelerator.prepare(DataLoader(data, 4))",
        needs="accelerate",
    ),
    fine(
        "accelerate",
        "a stream",
        ACCELERATE + STREAM + "loader = accelerator.prepare(DataLoader(Stream(), 4))",
        needs="accelerate",
    ),
    fine(
        "accelerate",
        "the same samples for all ranks, by its own sampler",
        ACCELERATE + GROUPS + "loader = accelerator.prepare(DataLoader(data, 4, sampler=Repeat()))",
        needs="accelerate",
    ),
    same(
        "accelerate",
        "loader not prepared",
        ACCELERATE + "net = accelerator.prepare(net)\nloader = DataLoader(data, 4)  # here",
        needs="accelerate",
    ),
]
