"""The head of programs that count what inductor benchmarks, and the CUDA graphs.

It benchmarks launchers of one kernel against each other, and whole algorithms.
"""

import json

import torch
from torch._inductor import select_algorithm
from torch._inductor.runtime import triton_heuristics as heuristics

seen = {"kernels": 0, "most_launchers": 0, "benchmarked": 0, "algorithms": 0, "graphs": 0}
run = heuristics.CachingAutotuner.run
benchmark = heuristics.CachingAutotuner.benchmark_all_configs
algorithms = select_algorithm.AlgorithmSelectorCache
choices = algorithms.benchmark_choices
capture = torch.cuda.CUDAGraph.capture_begin


def counted(self, *args, **kwargs):
    if not getattr(self, "_seen", False):
        self._seen = True
        seen["kernels"] += 1
        if len(self.launchers) == 0:
            self.precompile()
        seen["most_launchers"] = max(seen["most_launchers"], len(self.launchers))
    return run(self, *args, **kwargs)


def benchmark_counted(self, *args, **kwargs):
    seen["benchmarked"] += 1
    return benchmark(self, *args, **kwargs)


def choices_counted(*args, **kwargs):
    seen["algorithms"] += 1
    return choices(*args, **kwargs)


def capture_counted(self, *args, **kwargs):
    seen["graphs"] += 1
    return capture(self, *args, **kwargs)


heuristics.CachingAutotuner.run = counted
heuristics.CachingAutotuner.benchmark_all_configs = benchmark_counted
algorithms.benchmark_choices = staticmethod(choices_counted)
torch.cuda.CUDAGraph.capture_begin = capture_counted
torch._inductor.config.force_disable_caches = True


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n = torch.nn.Linear(512, 2048), torch.nn.LayerNorm(2048)
        self.b = torch.nn.Linear(2048, 512)

    def forward(self, x):
        y = torch.nn.functional.gelu(self.n(self.a(x)))
        return torch.nn.functional.cross_entropy(self.b(y), x[:, 0].long().abs())


def train(net):
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.rand(4096, 512, device="cuda")
        loss = net(x)
        loss.backward()
        net.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    show()


def show(**more):
    print(json.dumps({**seen, **more}), flush=True)
