"""The example script with one fault in it.

    example_with_fault.py FAULT RANK STEP ATTEMPTS SCRIPT [ARGS]...

On that rank, at that optimizer step of this process, in each of those attempts ("1", "1,2"), it
does what FAULT says (strike.py), inside the training step.
"""

import os
import runpy
import sys

import torch
from strike import attempt_in, strike

fault, rank, step, attempts, script, *rest = sys.argv[1:]
sys.argv = [script, *rest]
sys.path[0] = os.path.dirname(os.path.abspath(script))

if attempt_in(attempts) and os.environ.get("RANK") == rank:
    original, count = torch.optim.AdamW.step, 0

    def counted(self, *arguments, **options):
        global count
        count += 1
        if count == int(step):
            strike(fault)
        return original(self, *arguments, **options)

    torch.optim.AdamW.step = counted

runpy.run_path(script, run_name="__main__")
sys.stdout.flush()
os._exit(0)  # not every gloo job of torch 2.13 survives its own exit (pytorch#190489)
