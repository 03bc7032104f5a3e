"""A rank that loads a module of torch past the hooks, and fails like a tuned kernel if it compiles.

torch is a stand-in that costs no import. What is real: the module comes into the process without
importlib, as from a loader of the job's own, from the attempt on that is the argument.
"""

import os
import sys
import types

from _saferun.inject.hook_runner import current

context = current(os.environ["SAFERUN_INJECT"])
context.activate()  # as the first compilation does
name = "torch._inductor.runtime.triton_heuristics"
if int(os.environ["SAFERUN_ATTEMPT"]) >= int(sys.argv[1]):
    sys.modules[name] = types.ModuleType(name)
print("attempt", os.environ["SAFERUN_ATTEMPT"], "with", *context.mitigations, flush=True)
if "compile-off" not in context.mitigations:
    raise RuntimeError("benchmark_all_configs: Triton Error [CUDA]: invalid argument")
