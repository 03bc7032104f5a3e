"""Two peers that are no command of their own, started with torchrun's arguments.

    .venv-peers/bin/python benchmarks/peers_launchers.py lm-resiliency [OPTIONS] SCRIPT [ARGS]
    .venv-peers/bin/python benchmarks/peers_launchers.py ray [OPTIONS] SCRIPT [ARGS]

LM Resiliency is a rendezvous backend of torchrun, with three restarts. Its 0.2.0 declares an entry
point that torchrun calls without the argument that it needs, so it is registered here.

Ray Train is a TorchTrainer with `FailureConfig(max_failures=3)`. Its workers run the script as it
is: the process group that Ray has made is given up for the script's own. Of the options only the
number of processes has a meaning there. A script that ends by `os._exit` has failed there.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
from typing import Any


def lm_resiliency(argv: list[str]) -> None:
    """Run torchrun with LM Resiliency's rendezvous."""
    from lm_resiliency.integrations.torchrun import get_rendezvous_handler_creator
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.run import main

    rendezvous_handler_registry.register("lm_resiliency", get_rendezvous_handler_creator())
    folder = tempfile.mkdtemp(prefix="peers-lm-")
    context = f"lm_resiliency_restart_context_path={folder}/context/context.json"
    own = ["--rdzv-backend=lm_resiliency", f"--rdzv-endpoint={folder}/rendezvous"]
    own += ["--rdzv-id=peers", f"--rdzv-conf=store_type=file,{context}"]
    main(["--nnodes=1:1", "--max-restarts=3", *own, *argv])


def ray_train(argv: list[str]) -> None:
    """Run a TorchTrainer whose workers are the script's ranks."""
    os.environ |= {"RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    at = next(n for n, word in enumerate(argv) if not word.startswith("--"))
    options = dict(word.partition("=")[::2] for word in argv[:at])
    ranks = int(options["--nproc-per-node"])
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ray.init(num_cpus=ranks + 1)
    TorchTrainer(
        rank,
        train_loop_config={"argv": argv[at:], "port": port, "cwd": os.getcwd()},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(
            storage_path=tempfile.mkdtemp(prefix="peers-ray-"),
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


def rank(config: dict[str, Any]) -> None:
    """Be one rank: run the script in a worker of Ray's."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(config["port"])
    os.chdir(config["cwd"])
    sys.argv = config["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    {"lm-resiliency": lm_resiliency, "ray": ray_train}[sys.argv[1]](sys.argv[2:])
