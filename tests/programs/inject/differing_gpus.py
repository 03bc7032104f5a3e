import os

import torch
import torch.distributed as dist

name = "NVIDIA A100" if os.environ["RANK"] == "2" else "NVIDIA H100"
torch.cuda.is_initialized = lambda: True
torch.cuda.get_device_name = lambda: name
torch.cuda.nccl.version = lambda: (2, 27, 5 + (os.environ["RANK"] == "1"))
dist.init_process_group()
