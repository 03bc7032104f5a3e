import contextlib
import os
import types

import torch._dynamo.device_interface
from torch._inductor.runtime import triton_heuristics


class Config:
    pass


class Result:
    def __init__(self):
        self.config = Config()

    def make_launcher(self):
        def launcher():
            pass

        launcher.config = self.config
        return launcher


tuner = object.__new__(triton_heuristics.CachingAutotuner)
tuner.launchers = []
tuner.compile_results = [Result(), Result(), Result()]
tuner.custom_kernel = os.environ["CUSTOM"] == "True"
tuner.triton_meta = {"device": 0}
tuner.device_props = types.SimpleNamespace(warp_size=32, index=0, type="cuda")
torch._dynamo.device_interface.DeviceGuard = lambda *a: contextlib.nullcontext()
device = types.SimpleNamespace(current_device=lambda: 0, synchronize=lambda device: None)
tuner.get_device_interface = lambda: device
first = tuner.compile_results[0]
if hasattr(tuner, "_make_launchers"):
    tuner._make_launchers()
else:  # torch 2.4 to 2.6: what compiles makes the launchers
    tuner.lock, tuner.configs = contextlib.nullcontext(), [*tuner.compile_results]
    tuner._precompile_config = lambda result, _: (None, result.make_launcher())
    tuner.inductor_meta = {"dynamic_scale_rblock": False}
    tuner.precompile()
print(len(tuner.launchers), len(tuner.compile_results), tuner.compile_results[0] is first)
