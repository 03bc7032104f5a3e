import contextlib
import os

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
tuner.triton_meta = {"device": None}
torch._dynamo.device_interface.DeviceGuard = lambda *a: contextlib.nullcontext()
tuner.get_device_interface = lambda: None
first = tuner.compile_results[0]
tuner._make_launchers()
print(len(tuner.launchers), len(tuner.compile_results), tuner.compile_results[0] is first)
