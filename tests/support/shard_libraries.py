"""Programs that train with real libraries, for shard_programs.py; each needs its packages."""

from __future__ import annotations

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
TRANSFORMERS = source("inject/train_by_transformers")
LIGHTNING = source("inject/train_by_lightning")
TITAN = source("inject/torchtitan_text")
WEB = source("inject/webdataset_tars")
MOSAIC = source("inject/mosaicml_stream")
HUGGING = """
import datasets
rows = datasets.Dataset.from_dict({"x": torch.randn(320, 4).tolist()})
stream = rows.to_iterable_dataset(num_shards=4).with_format("torch")
"""
GROUPS = """
class Repeat(Sampler):  # a group of samples goes to all ranks, as prompts in GRPO
    def __iter__(self):
        for first in range(0, 160, 4):
            for _ in range(size): yield from range(first, first + 4)
    def __len__(self): return 160 * size
"""

WITH_LIBRARIES = [
    fine(
        "HF Trainer",
        "map-style",
        'KIND = "Trainer"\n' + TRANSFORMERS,
        needs="transformers",
        whole=True,
    ),
    same(
        "HF Trainer",
        "own get_train_dataloader",
        'KIND = "Own"\n' + TRANSFORMERS,
        needs="transformers",
        whole=True,
    ),
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
    fine(
        "accelerate",
        "torchdata's loader, prepared",
        "from accelerate import Accelerator, DataLoaderConfiguration as C\n"
        "accelerator = Accelerator(cpu=True, dataloader_config=C(use_stateful_dataloader=True))\n"
        "loader = accelerator.prepare(DataLoader(data, 4))",
        needs="torchdata",
    ),
    same(
        "accelerate",
        "loader not prepared",
        ACCELERATE + "net = accelerator.prepare(net)\nloader = DataLoader(data, 4)  # here",
        needs="accelerate",
    ),
    fine(
        "Lightning",
        "its sampler",
        "SHARD = True\n" + LIGHTNING,
        needs="lightning",
        whole=True,
    ),
    same(
        "Lightning",
        "use_distributed_sampler=False",
        "SHARD = False\n" + LIGHTNING,
        needs="lightning",
        whole=True,
    ),
    fine("torchtitan", "by data rank", "PART = (rank, size)\n" + TITAN, needs="torchtitan"),
    same("torchtitan", "rank 0 everywhere", "PART = (0, 1)\n" + TITAN, needs="torchtitan"),
    same(
        "torchdata",
        "no sampler",
        "from torchdata.stateful_dataloader import StatefulDataLoader\n"
        "loader = StatefulDataLoader(data, 4)  # here",
        needs="torchdata",
    ),
    fine(
        "HF datasets",
        "a stream, split by node",
        HUGGING + "from datasets.distributed import split_dataset_by_node\n"
        "part = split_dataset_by_node(stream, rank, size)\n"
        "loader = (batch['x'] for batch in DataLoader(part, 4))",
        needs="datasets",
    ),
    same(
        "HF datasets",
        "a stream, not split",
        HUGGING + "loaded = DataLoader(stream, 4)  # here\nloader = (one['x'] for one in loaded)",
        needs="datasets",
    ),
    fine(
        "WebDataset",
        "split by node",
        "HOW = dict(nodesplitter=lambda urls: list(urls)[rank::size])\n" + WEB,
        needs="webdataset",
    ),
    fine(
        "WebDataset",
        "resampled",
        "HOW = dict(resampled=True, nodesplitter=lambda urls: urls)\n" + WEB,
        needs="webdataset",
    ),
    same(
        "WebDataset",
        "not split by node",
        "HOW = dict(nodesplitter=lambda urls: urls)\n" + WEB,
        needs="webdataset",
    ),
    fine("MosaicML streaming", "by rank", "HOW = {}\n" + MOSAIC, needs="streaming"),
    same(
        "MosaicML streaming",
        "replicated, without tensor parallel",
        "HOW = dict(replication=2)\n" + MOSAIC,
        needs="streaming",
    ),
]
