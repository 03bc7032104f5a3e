import contextlib
import os

from torch._inductor.runtime import triton_heuristics

tuner = object.__new__(triton_heuristics.CachingAutotuner)
tuner.custom_kernel = os.environ["CUSTOM"] == "True"
tuner.launchers = [len, max, min]
tuner.benchmark_all_configs = lambda *a, **k: {one: n for n, one in enumerate((min, len, max))}
tuner._release_static_launchers_except = tuner._prune_compile_results_to_launcher = id
tuner.precompile_time_taken_ns = 0
with contextlib.suppress(AttributeError):  # what it logs at its end
    tuner.autotune_to_one_config()
print([one.__name__ for one in tuner.launchers])
