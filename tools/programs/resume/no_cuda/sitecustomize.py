"""Lets a rank of a script that names CUDA devices run on CPUs, unchanged.

nanoGPT's train.py takes cuda:N as its device wherever there are several ranks.
"""

import os

if "RANK" in os.environ:
    import torch
    from torch.nn.parallel import distributed

    def on_cpu(device):
        return "cpu" if str(device).startswith("cuda") else device

    def moves(method):
        return lambda self, device, *more, **options: method(self, on_cpu(device), *more, **options)

    def loads(file, map_location=None, load=torch.load, **options):
        return load(file, map_location=on_cpu(map_location), **options)

    class Parallel(distributed.DistributedDataParallel):
        def __init__(self, module, device_ids=None):
            super().__init__(module)

    class Autocast(torch.amp.autocast):
        def __init__(self, device_type, dtype):
            super().__init__("cpu", enabled=False)

    torch.cuda.set_device = lambda device: None
    torch.nn.Module.to = moves(torch.nn.Module.to)
    torch.Tensor.to = moves(torch.Tensor.to)
    torch.Tensor.pin_memory = lambda tensor: tensor
    torch.load = loads
    torch.amp.autocast = Autocast
    torch.nn.parallel.DistributedDataParallel = Parallel
