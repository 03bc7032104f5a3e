"""The head of programs in which the ranks of a gloo group train on what `loader` gives them."""

import torch
import torch.distributed as dist
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: F401, N817 - for what follows
from torch.utils.data import *  # noqa: F403 - for what follows

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 4))
net = torch.nn.Linear(4, 1)
