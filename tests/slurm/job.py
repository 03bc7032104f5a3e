"""A job as people write them: steps, a checkpoint, a handler that saves before the end.

    job.py NAME STEPS [TROUBLE NODE]

NAME.step is the checkpoint: the last step that was done, by rank 0; saving because of a signal
takes SAVE_S seconds, 2 by default. TROUBLE strikes the rank on NODE at step 3 of the first start:
`kill` (a signal ends it), `xid` (the driver's words for memory that failed, and an end), `raise`
(a mistake of its own). With `gloo` in NAME ranks talk at each step, which takes torch.
"""

import os
import signal
import sys
import time

name, steps, *rest = sys.argv[1:]
trouble, where = rest or ("", "")
rank = os.environ["RANK"]
first = os.environ.get("SAFERUN_ATTEMPT", "1") == "1" and "SLURM_RESTART_COUNT" not in os.environ
asked = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))


def say(text):
    print(f"rank {rank} on {os.environ['SLURMD_NODENAME']}: {text}", flush=True)


def done():
    try:
        with open(f"{name}.step", encoding="utf-8") as file:
            return int(file.read())
    except FileNotFoundError:
        return 0


def save(step):
    with open(f"{name}.step.new", "w", encoding="utf-8") as file:
        file.write(str(step))
    os.replace(f"{name}.step.new", f"{name}.step")


def strike():
    if trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif trouble == "raise":
        raise KeyError("a mistake of the script's own")
    print("NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable double bit error (DBE)")
    print("RuntimeError: CUDA error: uncorrectable ECC error encountered", file=sys.stderr)
    sys.stdout.flush()
    os._exit(1)


if "gloo" in name:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
step = done()
say(f"begins at step {step}")
while step < int(steps):
    step += 1
    if trouble and first and step == 3 and os.environ["SLURMD_NODENAME"] == where:
        strike()
    time.sleep(0.1)
    if "gloo" in name:
        dist.all_reduce(torch.ones(1))
    if asked:
        time.sleep(float(os.environ.get("SAVE_S", "2")))  # a checkpoint takes its time
        if rank == "0":
            save(step)
        say(f"saved step {step} because of {asked[0]}")
        sys.exit(1)
    if rank == "0" and step % 3 == 0:
        save(step)
say(f"done at step {step}")
if "gloo" in name:
    dist.destroy_process_group()
