import torch.distributed.distributed_c10d as c10d

inner = c10d.barrier


def barrier(*args, **kwargs):
    print(f"barrier {kwargs}\n", end="", flush=True)
    return inner(*args, **kwargs)


c10d.barrier = barrier
c10d.init_process_group("gloo")
