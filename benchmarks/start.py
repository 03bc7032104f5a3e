"""From the command to the end of the first step: torchrun, saferun, saferun with warm ranks.

    python benchmarks/start.py [--rounds 3] [--ranks 1 8] [--imports torch transformers] [--files]

Each round runs all ways one after the other, the first one another in each round. The script
imports, makes a CUDA context where there is a GPU (ranks share them), joins a gloo group (--nccl:
one of NCCL, a GPU each) and does one product and one all_reduce. Beside them stand
start_prototype.py and what no way that imports once can avoid: the imports alone, and the script
from their end to the first step.

Before the rounds each way runs once, so that files are in memory and warm ranks know what their
script imports. `--files` counts the files that a start opens, by strace, in place of the times: not
those of the kernel (/proc, /sys, /dev). The ratio is that of the medians; DESIGN's bounds are 0.55
for torch alone and 0.75 with transformers.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

WAYS = {
    "torchrun": ["torchrun"],
    "saferun": [sys.executable, "-m", "saferun"],
    "saferun warm": [sys.executable, "-m", "saferun", "--set", "start.ranks=warm"],
    "prototype": [sys.executable, str(Path(__file__).with_name("start_prototype.py"))],
}
IMPORTS = {
    "torch": "",
    "compile": "import torch._dynamo, torch._inductor.compile_fx",
    "transformers": "from transformers import Trainer, AutoModelForCausalLM",
}
JOB = """
import os, sys, time
import torch, torch.distributed as dist
{imports}
imported = time.time()
cuda = torch.cuda.is_available()
device = f"cuda:{{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}}" if cuda else "cpu"
if cuda: torch.cuda.set_device(device)
dist.init_process_group("{backend}")
x = torch.ones(256, 256, device=device) @ torch.ones(256, 256, device=device)
y = x.sum(); y = y if "{backend}" == "nccl" else y.cpu(); dist.all_reduce(y); y.item()
if os.environ["RANK"] == "0":
    now = time.time()
    with open(sys.argv[1], "w") as file: file.write(f"{{now}} {{now - imported}}")
    with open(sys.argv[1] + ".pss", "w") as file:
        ranks = open(f"/proc/{{os.getppid()}}/task/{{os.getppid()}}/children").read().split()
        texts = [open(f"/proc/{{pid}}/smaps_rollup").read() for pid in ranks]
        file.write(str(sum(int(t.split("Pss:")[1].split()[0]) for t in texts)))
dist.barrier()
dist.destroy_process_group()
"""


class Start(NamedTuple):
    """One start: seconds until the end of rank 0's first step, the script's own part of them."""

    seconds: float
    script_s: float  # from the end of the imports
    pss: float  # of the ranks together, in GiB


def run(way: str, ranks: int, job: Path, imports: str) -> Start:
    """Start the job once."""
    stamp = job.with_suffix(".stamp")
    began = time.time()
    subprocess.run(words(way, ranks, job, imports), check=True, capture_output=True, timeout=300)
    pss = int(stamp.with_suffix(".stamp.pss").read_text()) / (1 << 20)
    ended, script_s = map(float, stamp.read_text().split())
    return Start(ended - began, script_s, pss)


def words(way: str, ranks: int, job: Path, imports: str) -> list[str]:
    first = [imports] if way == "prototype" else []
    torchrun = [
        "--standalone",
        f"--nproc-per-node={ranks}",
        str(job),
        str(job.with_suffix(".stamp")),
    ]
    return [*WAYS[way], *first, *torchrun]


def opened(way: str, ranks: int, job: Path, imports: str) -> int:
    """Return how many files are opened, or looked for, until the end of rank 0's first step."""
    stamp, trace = job.with_suffix(".stamp"), job.with_suffix(".strace")
    command = words(way, ranks, job, imports)
    options = ["-f", "-e", "trace=open,openat", "-s", "4096", "-o", str(trace)]
    subprocess.run(["strace", *options, *command], capture_output=True, timeout=600, check=False)
    paths = re.findall(r'^\d+ +open(?:at)?\([^"]*"([^"]*)"', trace.read_text(), re.MULTILINE)
    until = paths[: paths.index(str(stamp))]
    return sum(not path.startswith(("/proc", "/sys/", "/dev/")) for path in until)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time starts.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--imports", nargs="+", default=["torch"], choices=IMPORTS)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--files", action="store_true")
    parser.add_argument("--nccl", action="store_true")
    options = parser.parse_args()
    if options.files and not shutil.which("strace"):
        sys.exit("there is no strace")
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(XDG_CACHE_HOME=f"{folder}/cache", XDG_STATE_HOME=f"{folder}/state")
        for imports in options.imports:
            job = Path(folder, f"train_{imports}.py")
            job.write_text(
                JOB.format(imports=IMPORTS[imports], backend="nccl" if options.nccl else "gloo")
            )
            for ranks in options.ranks:
                _rows(imports, ranks, job, options)


def _rows(imports: str, ranks: int, job: Path, options: argparse.Namespace) -> None:
    names, code = options.ways, IMPORTS[imports]
    for way in names:
        print(f"{way} at first sight: {run(way, ranks, job, code).seconds:.1f} s", flush=True)
    if options.files:
        counts = {way: opened(way, ranks, job, code) for way in names}
        print(imports, ranks, counts, flush=True)
        return
    found: dict[str, list[Start]] = {way: [] for way in names}
    once: list[float] = []
    for number in range(options.rounds):
        first = number % len(names)
        for way in names[first:] + names[:first]:
            found[way].append(run(way, ranks, job, code))
            print(f"{way} {found[way][-1].seconds:.1f}", file=sys.stderr, flush=True)
        once.append(_import_s(code))
    base = statistics.median(start.seconds for start in found[names[0]])
    for way, starts in found.items():
        median = statistics.median(start.seconds for start in starts)
        each = " ".join(f"{s.seconds:.1f}" for s in sorted(starts))
        own = statistics.median(start.script_s for start in starts)
        print(
            f"{imports:13} {ranks} ranks  {way:13} {median:5.1f} s ({each})  "
            f"{median / base:.2f} x {names[0]}  its script {own:.2f} s  "
            f"{statistics.median(start.pss for start in starts):.2f} GiB",
            flush=True,
        )
    print(f"{imports:13} imported once {statistics.median(once):.2f} s", flush=True)


def _import_s(code: str) -> float:
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", f"import torch, torch.distributed.run\n{code}"], check=True
    )
    return time.monotonic() - began


if __name__ == "__main__":
    main()
