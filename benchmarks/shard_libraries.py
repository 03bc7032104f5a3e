"""Programs that train with real libraries, for shards.py; each needs its packages."""

from __future__ import annotations

from pathlib import Path

from shard_program import fine, same


def _source(name: str) -> str:
    return Path(__file__).with_name("shard_jobs").joinpath(f"{name}.py").read_text()


TRANSFORMERS = _source("train_by_transformers")
LIGHTNING = _source("train_by_lightning")
TITAN = _source("torchtitan_text")
WEB = _source("webdataset_tars")
MOSAIC = _source("mosaicml_stream")
HUGGING = """
import datasets
rows = datasets.Dataset.from_dict({"x": torch.randn(320, 4).tolist()})
stream = rows.to_iterable_dataset(num_shards=4).with_format("torch")
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
    fine(
        "accelerate",
        "torchdata's loader, prepared",
        "from accelerate import Accelerator, DataLoaderConfiguration as C\n"
        "accelerator = Accelerator(cpu=True, dataloader_config=C(use_stateful_dataloader=True))\n"
        "loader = accelerator.prepare(DataLoader(data, 4))",
        needs="torchdata",
    ),
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
