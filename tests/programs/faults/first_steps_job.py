"""A job without torch whose ranks print steps; FIRST has the first one of each rank from attempt 2.

In attempt 1, which begins at step 0 on all, rank 1 kills itself. With HOW=own the lines do not say
whose they are. It prints until somebody ends it, or LAST steps.
"""

import os
import signal
import time

rank, attempt = int(os.environ["RANK"]), int(os.environ["SAFERUN_ATTEMPT"])
step = int(os.environ["FIRST"].split()[rank]) if attempt > 1 else 0
last = step + int(os.environ.get("LAST", "1000000"))
whose = "" if os.environ.get("HOW") == "own" else f"rank {rank} "
while step < last:
    print(f"{whose}step {step} loss 1.0", flush=True)
    if attempt == 1 and rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    step += 1
    time.sleep(0.05)
