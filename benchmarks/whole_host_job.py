"""The job of whole_host.py: steps of a tenth of a second, and faults that are planted meanwhile.

    whole_host_job.py DIR

Each rank leaves its pid in `DIR/pids`, rank 0 its steps with their times in `DIR/steps`, from which
the next start goes on. `DIR/fault-RANK` holds what that rank does then: `spin`, `sleep`, or `slow`,
which makes each of its steps a fifth longer. `DIR/stop` ends the job.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.1
place, rank = Path(sys.argv[1]), int(os.environ["RANK"])
(place / "pids" / str(rank)).write_text(str(os.getpid()))
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")
gradients = [torch.ones(100_000, device=device) for _ in range(10)]
ends = torch.zeros(1, device=device)
steps = place / "steps"
lines = steps.read_text().splitlines() if steps.exists() else []
step = int(lines[-1].split()[1]) if lines else 0
fault = place / f"fault-{rank}"
while True:
    what = fault.read_text() if fault.exists() else ""
    time.sleep(STEP_S * (1.2 if what == "slow" else 1.0))  # the length of a step, as of its kernels
    if what in ("spin", "sleep"):
        fault.unlink()
    while what == "spin":
        pass
    while what == "sleep":
        time.sleep(1)
    for one in gradients:
        dist.all_reduce(one)
        one.fill_(1.0)
    if rank == 0:
        ends.fill_(float((place / "stop").exists()))
    dist.broadcast(ends, 0)
    if ends.item():
        break
    step += 1
    if rank == 0:
        with steps.open("a") as file:
            file.write(f"{time.time():.2f} {step}\n")
dist.destroy_process_group()
