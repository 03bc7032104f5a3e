"""Compile a model in several ways, with right and wrong indices, and print what came of each.

All but REAL=1 end before inductor generates C++, which takes seconds for each graph.
"""

import functools
import json
import os
import traceback

import torch
import torch._inductor.config as config
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
import torch.utils.checkpoint
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.compile_fx import compile_fx


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(50, 16)
        self.out = torch.nn.Linear(16, 10)

    def forward(self, ids, labels):
        return F.cross_entropy(self.out(self.table(ids)), labels)  # here


class Checkpointed(Net):
    def forward(self, ids, labels):
        deep = super().forward
        return torch.utils.checkpoint.checkpoint(deep, ids, labels, use_reentrant=False)


class Bags(Net):
    def forward(self, ids, labels):
        bags = F.embedding_bag(ids[:, None], self.table.weight)
        labels = labels.where(labels >= 0, 77)
        return F.nll_loss(F.log_softmax(self.out(bags), 1), labels, ignore_index=77)


class Samples(Net):
    def forward(self, ids, labels):
        logits = self.out(self.table.weight[ids])
        return torch.vmap(F.cross_entropy)(logits, labels).sum()


def lowered(graph, inputs, **options):
    """Stand for inductor's inner_compile: what it would generate code from is run as it is."""
    seen.extend(str(node.target) for node in graph.graph.nodes)
    return make_boxed_func(graph.forward)


def custom(graph, inputs):
    """A backend of the script's own."""
    seen.extend(str(node.target) for node in graph.graph.nodes)
    return graph.forward


seen: list[str] = []
ids, labels = torch.arange(4), torch.tensor([1, 2, 3, -100])
inductor = functools.partial(compile_fx, inner_compile=lowered)
if os.environ.get("REAL") == "1":
    inductor = "inductor"
WAYS = {
    "plain": (Net, {"backend": inductor, "fullgraph": True}),
    "checkpointed": (Checkpointed, {"backend": inductor, "fullgraph": True}),
    "bags": (Bags, {"backend": inductor}),
    "dynamic": (Net, {"backend": inductor, "dynamic": True}),
    "transformed": (Samples, {"backend": inductor}),
    "custom": (Net, {"backend": custom}),
    "graphs": (Net, {"backend": inductor}),
}
found = {}
for way in os.environ.get("WAYS", ",".join(WAYS)).split(","):
    kind, options = WAYS[way]
    torch._dynamo.reset()
    counters.clear()
    seen.clear()
    torch.manual_seed(0)
    net, good = kind(), labels.clamp(0) if way == "transformed" else labels
    config.triton.cudagraphs = way == "graphs"
    expected = net(ids, good)
    expected.backward()
    grad, net.out.weight.grad = net.out.weight.grad, None
    compiled = torch.compile(net, **options)
    loss = compiled(ids, good)
    loss.backward()
    config.triton.cudagraphs = False
    result = {
        "same": bool(torch.allclose(loss, expected) and torch.allclose(net.out.weight.grad, grad)),
        "breaks": sum(counters["graph_break"].values()),
        "graphs": counters["stats"]["unique_graphs"],
        "checks": sum("in_range" in name for name in seen),
    }
    for word, wrong in {"label": (ids, labels + 7), "token": (ids + 47, labels)}.items():
        try:
            compiled(*wrong)
            result[word] = "no error"
        except Exception as error:
            result[word] = f"{type(error).__name__}: {error}"
    result["after"] = bool(torch.equal(compiled(ids, good), loss))
    result["cached"] = dict(counters["aot_autograd"])
    found[way] = result

exported = torch.export.export(Net(), (ids, labels))
found["exported"] = sum("in_range" in str(node.target) for node in exported.graph.nodes)
scripted = torch.jit.script(torch.nn.CrossEntropyLoss())
found["scripted"] = float(scripted(torch.zeros(2, 10), torch.tensor([1, 2])))
try:
    Net()(ids, labels + 7)
except IndexError as error:
    names = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    found["eager"] = any("inject" in name for name in names[1:])
print(json.dumps(found))
