"""The mitigation table: which real failure each small program has, and what must come of it.

A row's program fails for the real reason, as far as this can be had on a CPU; gpu_table.py has the
rows that need a GPU. `NOT_HERE` names the kinds for which it cannot be had at all, with the
reason, and they are never counted as passed. surroundings.py makes what stands around a program,
ways.py runs a row; test_live.py asserts, and benchmarks/mitigations.py prints what came out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import rights
from surroundings import (
    Around,
    closed_rendezvous,
    earlier_cache,
    few_descriptors,
    foreign_store,
    held_port,
    looked_up_file,
    no_compiler,
    nothing,
    privileged_port,
    roomy,
    server,
    small_tmpfs,
)


class Case(NamedTuple):
    """One row."""

    kind: str
    program: str
    mitigations: tuple[str, ...]  # that are added, in order; none where a retry is all it takes
    shows: str  # in the output at the end: it did its work, and what need not give way did not
    alone: str  # what is left as it was
    around: Around
    ranks: int = 2
    needs: Callable[[], bool] | None = None  # of the machine; its docstring is the reason
    healthy: Around = nothing()  # what stands around a run without the fault
    stops: bool = False  # no launcher can mitigate it: one attempt, and an explanation
    gpus: int = 0  # that it needs


def can_mount() -> bool:
    """it needs the right to mount"""
    return not rights.missing("make namespaces")


def can_forbid_port_80() -> bool:
    """ports from 80 on are open to everybody here"""
    with open("/proc/sys/net/ipv4/ip_unprivileged_port_start", encoding="utf-8") as file:
        return int(file.read()) > 80


CASES = [
    Case(
        "too-many-open-files",
        "too_many_open_files.py",
        ("more-open-files",),
        "kept 400 batches",
        "torch's way to share tensors",
        few_descriptors,
        ranks=1,
    ),
    Case(
        "dynamo-error",
        "dynamo_error.py",
        ("compile-fallback",),
        "compiled ['cosine'",
        "the other function stays compiled",
        nothing(),
        ranks=1,
    ),
    Case("port-in-use", "meet.py", ("free-port",), "met 2 of 2", "the port's holder", held_port),
    Case(
        "port-privileged",
        "meet.py",
        ("free-port",),
        "met 2 of 2",
        "the job's rights",
        privileged_port,
        needs=can_forbid_port_80,
    ),
    Case(
        "gloo-wrong-interface",
        "meet.py",
        ("gloo-socket-interface",),
        "met 2 of 2",
        "the backend",
        nothing(GLOO_SOCKET_IFNAME="eth97"),
    ),
    Case(
        "rendezvous-connect-failed",
        "meet.py",
        (),
        "met 2 of 2",
        "the rendezvous that was asked for",
        foreign_store("late"),
        healthy=foreign_store(""),
    ),
    Case(
        "rendezvous-closed",
        "meet.py",
        (),
        "met 2 of 2",
        "the rendezvous that was asked for",
        closed_rendezvous,
        healthy=foreign_store(""),
    ),
    *(
        Case(
            kind,
            "compile_one.py",
            ("fresh-compile-cache",),
            "compiled 1 graph",
            "it stays compiled",
            earlier_cache(damaged=damaged),
            healthy=earlier_cache(),
        )
        for kind, damaged in (("inductor-cache-race", "*.main.so"), ("cpp-compile-error", "*.so"))
    ),
    Case(
        "compile-toolchain-missing",
        "compile_one.py",
        ("compile-off",),
        "mean 1",
        "the result",
        no_compiler,
        ranks=1,
        healthy=nothing(args=("cpu",)),
    ),
    Case(
        "inductor-autotune-error",
        "inductor_autotune_error.py",
        ("autotune-off",),
        "compiled 1 graph",
        "it stays compiled",
        nothing(),
        ranks=1,
    ),
    Case(
        "ddp-optimizer-error",
        "ddp_optimizer_error.py",
        ("ddp-optimizer-off",),
        "compiled 1 graph",
        "it stays compiled",
        nothing(),
    ),
    Case(
        "dynamo-recompile-limit",
        "dynamo_recompile_limit.py",
        ("compile-off",),
        "sum 190",
        "the result",
        nothing(),
        ranks=1,
    ),
    Case(
        "hub-unavailable",
        "hub_unavailable.py",
        (),
        "fetched config",
        "every setting",
        server(refusals=1),
        ranks=1,
        healthy=server(refusals=0),
    ),
    *(
        Case(
            f"study-storage-{way}",
            "study_storage.py",
            (),
            "searched",
            "every setting",
            nothing(args=(way,)),
            ranks=1,
            healthy=nothing(args=(way,)),
        )
        for way in ("locked", "full")
    ),
    Case(
        "stale-file-handle",
        "stale_file_handle.py",
        (),
        "read new",
        "every setting",
        looked_up_file(replaced=True),
        ranks=1,
        needs=can_mount,
        healthy=looked_up_file(replaced=False),
    ),
    Case(
        "database-unavailable",
        "database_locked.py",
        (),
        "counted",
        "every setting",
        nothing(),
        ranks=1,
    ),
    Case("peer-lost", "peer_lost.py", (), "met 2", "every setting", nothing()),
    *(
        Case(
            kind,
            "rank_fails.py",
            ("new-session",) if kind == "sighup-terminal-closed" else (),
            "met 2",
            "every setting",
            nothing(args=(kind,)),
            healthy=nothing(args=(kind,)),
        )
        for kind in (
            *("segfault", "bus-error", "abort-unknown", "ended-by-signal", "killed-from-outside"),
            *("nccl-timeout", "sigterm-preempted", "sighup-terminal-closed"),
        )
    ),
    Case(
        "dataloader-shm-full",
        "dataloader_shm_full.py",
        (),
        "loaded 8 batches",
        "",
        small_tmpfs("/dev/shm"),
        ranks=1,
        needs=can_mount,
        stops=True,
    ),
    Case(
        "disk-full",
        "disk_full.py",
        (),
        "saved",
        "",
        small_tmpfs("out"),
        ranks=1,
        needs=can_mount,
        healthy=roomy,
        stops=True,
    ),
]
NCCL = "needs NCCL between GPUs"
NOT_HERE = {
    "cuda-oom-despite-free": "the driver refused memory that it called free; a limit that the "
    "script sets itself looks the same and is not mitigated",
    "tf-cudnn-init-failed": "needs TensorFlow and a CUDA GPU",
    "tf-nccl-failed": "needs TensorFlow: shown in tests/tensorflow",
    "tf-xla-failed": "needs TensorFlow: shown in tests/tensorflow",
    "cuda-devices-busy": "needs a GPU in exclusive mode, which not every machine may be put in",
    "study-storage-unreachable": "needs PostgreSQL: shown in tests/inject/test_optuna_postgres.py",
    "process-limit": "no such limit binds root: shown in tests/faults/test_mitigated.py",
    "loss-not-finite": "only the watch sees it, no setting avoids it: tests/faults/test_loss.py",
    "hang": "only the watch sees it, and no setting avoids it: tests/faults/test_hangs.py",
    "keeper-killed": "saferun's own failure: shown in tests/faults/test_keeper_loss.py",
    "node-lost": "needs hosts: shown in tests/nodes",
    "node-failed": "needs Slurm and a node that fails",
    "triton-compile-error": "needs a GPU and a fault of the compiler's own",
    "nccl-unhandled-cuda-error": NCCL + " and a driver that refuses one of its calls",
    "inductor-compile-worker-died": "on an H200 the program hung for 75 s with and without saferun "
    "where its compile workers were killed, and did not fail",
    "nccl-shm-failed": "where /dev/shm is too small for anything, two H200s lack NCCL's pool of "
    "33 MiB for its proxies first, and no variable does without that; the transport's own segment "
    "would need one that holds the pools and no more",
    "nccl-system-error": NCCL + " and a system call that fails without a word",
    "nccl-internal-error": NCCL + " and a fault without a word",
    "nccl-p2p-hang": NCCL + " that cannot reach each other's memory",
    "nccl-ib-error": NCCL + " and InfiniBand",
    "store-without-libuv": "needs a build of torch without libuv; its wheels for Linux have it",
    "stale-rendezvous-store": "with torch 2.13 the next job met all the same in a store that had "
    "an earlier job's keys; the barrier that counts workers is off there, and where "
    "TORCH_DIST_INIT_BARRIER=1 asks for it, passes at once if an earlier job has completed it",
}
