"""Programs that ask for torch.compile in every way, and show what inductor then does."""

from releases import torch_before
from repo import source

KEYS = [
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
    "triton.autotune_pointwise",
    "triton.cudagraphs",
]
PROBE = source("inject/lowered_graphs")
STANCE = "default" if torch_before("2.7") else "eager_then_compile"
STANCES = {
    "a stance": f"""
config.max_autotune = True
with torch.compiler.set_stance("{STANCE}"):
    f = torch.compile(body); f(x); f(x).backward(dx)
""",
    "a backend that a stance forces": """
config.max_autotune = True
with torch.compiler.set_stance(force_backend="inductor"):
    torch.compile(body, backend="eager")(x).backward(dx)
""",
}
WAYS = {
    **({} if torch_before("2.6") else STANCES),
    "mode": "torch.compile(body, mode='max-autotune')(x).backward(dx)",
    "options": "torch.compile(body, options=ALL)(x).backward(dx)",
    "dashed options": "torch.compile(body, options={'max-autotune': True})(x).backward(dx)",
    "decorator": """
@torch.compile
def f(x): return body(x)
config.max_autotune = True
f(x).backward(dx)
""",
    "decorator with arguments": """
@torch.compile(mode="max-autotune", dynamic=False)
def f(x): return body(x)
f(x).backward(dx)
""",
    "module": """
class M(torch.nn.Module):
    def forward(self, x): return body(x)
m = M(); m.compile(mode="max-autotune"); m(x).backward(dx)
""",
    "full graph": "torch.compile(body, mode='max-autotune', fullgraph=True)(x).backward(dx)",
    "one block of a model": """
class M(torch.nn.Module):
    def forward(self, x): return body(x)
m = torch.nn.Sequential(M(), torch.nn.Identity()); m[0].compile(mode="max-autotune")
m(x).backward(dx)
""",
    "assignment before": """
for key, value in ALL.items(): setattr(config, key, value)
torch.compile(body)(x).backward(dx)
assert all(config.get_config_copy()[key] for key in KEYS), "the script's own values changed"
""",
    "assignment between forward and backward": """
config.max_autotune = True
y = torch.compile(body)(x)
for key, value in ALL.items(): setattr(config, key, value)
y.backward(dx)
""",
    "patch": """
with config.patch(ALL):
    torch.compile(body)(x).backward(dx)
""",
    "inductor's own compile": """
gm = torch.fx.symbolic_trace(lambda x: (x @ x,))
torch._inductor.compile(gm, [x.detach()], options=ALL)(x.detach())
""",
    "names taken before": """
from torch import compile as mine
from torch._inductor.compile_fx import compile_fx
config.max_autotune = True
mine(body, backend=compile_fx)(x).backward(dx)
""",
}
ALL_WAYS = f"""
found = {{}}
untouched = config.save_config()
for way, code in {WAYS!r}.items():
    torch._dynamo.reset(); config.load_config(untouched); lowered.clear()
    exec(code, dict(globals()))
    found[way] = list(lowered)
show(found)
"""

EAGER = source("inject/matrix_module")
COMPILED = {
    "function": "torch.compile(body, fullgraph=True)(x)",
    "decorator": "torch.compile()(body)(x)",
    "decorator with arguments": "torch.compile(mode='max-autotune', dynamic=True)(body)(x)",
    "module": "m = torch.compile(M()); m(x)",
    "module in place": "m = M(); m.compile(); m(x)",
    "class": "C = torch.compile(M); C()(x)",
}
COUNT = f"""
from torch._dynamo.utils import counters
for way, code in {COMPILED!r}.items():
    torch._dynamo.reset(); counters.clear()
    exec(code, dict(globals()))
    print(way, "=", counters["stats"]["unique_graphs"] > 0)
"""
