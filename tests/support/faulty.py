"""The example script with one fault in it: `faulty.py FAULT RANK STEP ATTEMPTS SCRIPT [ARGS]...`

On that rank, at that optimizer step of this process, in each of those attempts ("1", "1,2"), it
does what FAULT says, as a bug in a real job would: inside the training step.
"""

import os
import runpy
import signal
import sys
import time

import torch

fault, rank, step, attempts, script, *rest = sys.argv[1:]
sys.argv = [script, *rest]
sys.path[0] = os.path.dirname(os.path.abspath(script))


def strike():
    sys.stdout.flush()
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(30)
    elif fault.startswith("exit"):
        os._exit(int(fault[4:]))
    elif fault == "raise":
        raise RuntimeError("size mismatch in the user's own code")
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "segv":
        import ctypes

        ctypes.string_at(0)
    elif fault == "babble":  # a process of the rank speaks after the rank's death
        rank = os.getpid()
        if os.fork() == 0:
            while os.getppid() == rank:
                time.sleep(0.001)
            os.write(1, b"said after the rank's death\n")
            os._exit(0)
        os.kill(rank, signal.SIGKILL)


if os.environ.get("SAFERUN_ATTEMPT") in attempts.split(",") and os.environ.get("RANK") == rank:
    original, count = torch.optim.AdamW.step, 0

    def counted(self, *arguments, **options):
        global count
        count += 1
        if count == int(step):
            strike()
        return original(self, *arguments, **options)

    torch.optim.AdamW.step = counted

runpy.run_path(script, run_name="__main__")
sys.stdout.flush()
os._exit(0)  # not every gloo job of torch 2.13 survives its own exit (pytorch#190489)
