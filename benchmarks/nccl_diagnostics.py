"""What does NCCL's own diagnosis (NCCL_RUN_DIAGNOSTICS, NCCL 2.31 on) cost a job's start?

Two ranks make a process group and a first all-reduce, with the variable and without, in turn, in
new processes. The clock runs from `init_process_group` to the end of that all-reduce; CUDA's
context is made before. Further communicators show what each one adds, since NCCL tests the paths of
every communicator. Bound: 10 s more.

LIBRARY is a libnccl.so.2 that is loaded in place of torch's own; without it torch's own is. With
one GPU a NCCL_HOSTID for each rank makes them two hosts: then no path between GPUs is tested, and
the test of the network is tried. Without a GPU gloo stands in, which reads no such variable: that
tries this program only.

    python benchmarks/nccl_diagnostics.py [LIBRARY] [--pairs 5] [--communicators 1]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time

VARIABLE = "NCCL_RUN_DIAGNOSTICS"
RESULT = "result: "
TIMEOUT_S = 150


def rank_main(communicators: int) -> None:
    """Be one rank: measure, and print the result as the last line."""
    import torch  # the parent needs none
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    ones = torch.ones(1 << 20, device=device)
    if gpus:
        torch.cuda.synchronize()
    began_s = time.perf_counter()
    dist.init_process_group("nccl" if gpus else "gloo")
    groups = [None, *(dist.new_group() for _ in range(communicators - 1))]
    seconds = []
    for group in groups:
        dist.all_reduce(ones, group=group)
        if gpus:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    version = ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none, gloo stands in"
    print(RESULT + json.dumps({"seconds": seconds, "nccl": version}), flush=True)
    dist.destroy_process_group()


def start(library: pathlib.Path | None, args: argparse.Namespace, *, diagnoses: bool) -> list[str]:
    """Run two ranks; return what each has printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {name: value for name, value in os.environ.items() if name != VARIABLE}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    base |= {VARIABLE: "1"} if diagnoses else {}
    base |= {"LD_PRELOAD": str(library)} if library else {}
    command = [sys.executable, __file__, "--rank", "--communicators", str(args.communicators)]
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own |= {"NCCL_HOSTID": f"host{rank}"} if args.gpus == 1 else {}
        ranks.append(
            subprocess.Popen(
                command, env=base | own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [one.communicate(timeout=TIMEOUT_S)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    if any(one.returncode for one in ranks):
        sys.exit("a rank failed:\n" + "\n".join(outputs))
    return outputs


def gpu_count() -> int:
    """Ask in another process: this one shall have no CUDA."""
    code = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.check_output([sys.executable, "-c", code], text=True))


def measured(outputs: list[str]) -> tuple[list[float], str]:
    """The seconds of the slower rank after each communicator's first sum, and NCCL's version."""
    found = [
        json.loads(line.removeprefix(RESULT))
        for output in outputs
        for line in output.splitlines()
        if line.startswith(RESULT)
    ]
    seconds = [max(each) for each in zip(*(one["seconds"] for one in found), strict=True)]
    return seconds, found[0]["nccl"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", nargs="?", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--communicators", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        rank_main(args.communicators)
        return
    library = args.library.resolve(strict=True) if args.library else None
    args.gpus = gpu_count()
    start(library, args, diagnoses=False)  # files come from the disk once
    without, with_it, lines, version = [], [], [], ""
    for pair in range(args.pairs):
        times, version = measured(start(library, args, diagnoses=False))
        without.append(times[-1])
        outputs = start(library, args, diagnoses=True)
        with_it.append(measured(outputs)[0][-1])
        if pair == 0:
            print(f"NCCL {version}, {args.gpus} GPUs, {args.communicators} communicator(s)")
            print("| pair | without, s | with, s | more, s |\n| --- | ---: | ---: | ---: |")
        more = with_it[-1] - without[-1]
        print(f"| {pair + 1} | {without[-1]:.2f} | {with_it[-1]:.2f} | {more:+.2f} |", flush=True)
        lines = [line for output in outputs for line in output.splitlines() if "NCCL DIAG" in line]
    medians = statistics.median(without), statistics.median(with_it)
    print(f"| median | {medians[0]:.2f} | {medians[1]:.2f} | {medians[1] - medians[0]:+.2f} |")
    print("\nwhat NCCL printed in the last pair:")
    print("\n".join(lines) or "nothing")


if __name__ == "__main__":
    main()
