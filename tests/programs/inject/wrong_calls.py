"""Tell whether torch's complaints about a call are the same with and without our wrapper."""

import inspect

import torch.distributed as dist

ours, torchs = dist.init_process_group, inspect.unwrap(dist.init_process_group)


def complaint(call, **arguments):
    try:
        call(**arguments)
    except Exception as error:
        return type(error).__name__, str(error)


nonsense = {"backend": "gloo", "nonsense": 1}
print(complaint(ours, **nonsense) == complaint(torchs, **nonsense))
print(complaint(ours, backend="gloo"))
print(complaint(ours, backend="gloo") == complaint(torchs, backend="gloo"))
print(complaint(ours, backend="gloo"))
