"""torchtitan 0.2's own trainer and checkpoint manager, on CPUs: a small model, small data.

torchtitan knows no CPU: its type of device, the device's names and memory, and two calls that gloo
refuses have stand-ins here. The options are torchtitan's.
"""

import os
import sys
import types
from dataclasses import replace

import datasets
import small_model
import torch
from torch import distributed
from torch.distributed import distributed_c10d

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device: "CPU"
torch.cpu.get_device_properties = lambda device: types.SimpleNamespace(total_memory=1 << 30)
torch.cpu.memory_stats = lambda device: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
kernels = types.SimpleNamespace(generate_permute_indices=None)  # need Triton, and a MoE
sys.modules["torchtitan.models.moe.kernels"] = kernels
os.environ["LOCAL_RANK"] = "0"  # the device's number: there is one CPU

import torchtitan.train  # noqa: E402 - the stand-ins first
from torchtitan.hf_datasets.text_datasets import DATASETS, DatasetConfig  # noqa: E402 - the stand-ins first
from torchtitan.models import llama3  # noqa: E402 - the stand-ins first
from torchtitan.protocols import train_spec  # noqa: E402 - the stand-ins first

distributed.barrier = lambda device_ids=None, barrier=distributed.barrier: barrier()
distributed_c10d._set_pg_timeout = lambda timeout, group=None: None


class Letters:
    """A tokenizer of bytes."""

    eos_id = 1

    def encode(self, text, add_bos, add_eos):
        return [0, *text.encode(), self.eos_id]


ROWS = datasets.Dataset.from_list([{"text": f"{n} {n**2} {n**3}"} for n in range(2000)])
DATASETS["rows"] = DatasetConfig("", lambda path: ROWS, lambda row: row["text"])
SIZE = llama3.TransformerModelArgs(dim=64, n_layers=2, n_heads=2, vocab_size=small_model.WORDS)
SPEC = replace(
    train_spec.get_train_spec("llama3"),
    model_args={"small": SIZE},
    build_tokenizer_fn=lambda config: Letters(),
)
train_spec.register_train_spec("small", SPEC)
made, seen = [], []


def trainer(config):
    """Return torchtitan's trainer; what it logs is kept."""
    made.append(torchtitan.train.Trainer(config))
    made[0].metrics_processor.logger.log = lambda metrics, step: seen.append(metrics)
    return made[0]


torchtitan.train.main(trainer)
if os.environ["RANK"] == "0":
    small_model.report(made[0].model_parts[0], seen[-1]["loss_metrics/global_avg_loss"])
