"""What the guards promise: an error of Python's at the user's line, and nothing else changes."""

import json
import sys

import pytest
from cases import slow
from repo import source

ALL = {"labels": "on", "logits": "on", "embeddings": "on"}
HEAD = source("inject/guard_cases")
WRONG = {
    "function": ("F.cross_entropy(logits, labels)", "labels out of range: 10, 57 (2 of 4"),
    "alias": ("taken(logits, labels)", "there are 10 classes: 0 to 9, or -100"),
    "module": ("torch.nn.CrossEntropyLoss()(logits, labels)", "the first at [2]"),
    "ignored elsewhere": (
        "F.cross_entropy(logits, labels, ignore_index=57)",
        "out of range: 10 (1 of 4 values",
    ),
    "smoothed": ("F.cross_entropy(logits, target=labels, label_smoothing=0.1)", "10, 57"),
    "nll": ("F.nll_loss(logits, labels - 20)", "nll_loss: labels out of range: -19, -18, -10, 37"),
    "nll module": ("torch.nn.NLLLoss()(logits, labels)", "nll_loss: labels"),
    "spatial": (
        "F.cross_entropy(torch.randn(1, 3, 2, 2), torch.tensor([[[0, 1], [2, 3]]]))",
        "out of range: 3 (1 of 4 values, the first at [0, 1, 1])",
    ),
    "one sample": ("F.cross_entropy(logits[0], labels[3])", "the first at []"),
    "many": ("F.cross_entropy(torch.randn(9, 2), torch.arange(9))", "2, 3, 4, 5, 6, … (7 of 9"),
    "embedding": ("torch.nn.Embedding(5, 3)(torch.tensor([0, 5]))", "5 rows in the table: 0 to 4"),
    "bag": ("torch.nn.EmbeddingBag(5, 3)(torch.tensor([[0, -1]]))", "embedding_bag: indices"),
    "shape": ("F.cross_entropy(logits, labels[:3])", "labels of shape (4,), not (3,)"),
    "classes last": (
        "F.cross_entropy(torch.randn(2, 5, 10), torch.zeros(2, 5).long())",
        "logits.transpose(1, -1)",
    ),
}
RIGHT = {
    "function": "F.cross_entropy(logits, labels % 10)",
    "ignored": "F.cross_entropy(logits, torch.tensor([1, -100, 2, 3]))",
    "all ignored": "F.cross_entropy(logits, torch.full((4,), 77), ignore_index=77)",
    "probabilities": "F.cross_entropy(logits, logits.softmax(1))",
    "bytes": "F.cross_entropy(logits, torch.ones(4, dtype=torch.uint8))",
    "one sample": "F.cross_entropy(logits[0], torch.tensor(9))",
    "nothing": "F.cross_entropy(logits[:0], torch.zeros(0).long(), reduction='sum')",
    "embedding": "F.embedding(torch.tensor([[4]]), torch.randn(5, 2), padding_idx=1)",
    "bag": "F.embedding_bag(torch.tensor([0, 4]), torch.randn(5, 3), torch.tensor([0]))",
    "vmap": "torch.func.vmap(F.cross_entropy)(logits[None], (labels % 10)[None])",
    "grad": "torch.func.grad(lambda x: F.cross_entropy(x, labels % 10))(logits)",
    "fake": (
        "with_mode = __import__('torch._subclasses', fromlist=['x']).FakeTensorMode()\n"
        "with with_mode: F.cross_entropy(torch.randn(4, 10), torch.zeros(4).long())"
    ),
    "meta": "F.embedding(torch.zeros(2, device='meta').long(), torch.randn(5, 2, device='meta'))",
    "fx": "torch.fx.symbolic_trace(M())(labels % 5)",
    "jit script": "torch.jit.script(M())(labels % 5)",
    "jit trace": "torch.jit.trace(M(), labels % 5)(labels % 5)",
    "ready-made subclass": "F.cross_entropy(logits.as_subclass(Mine), labels % 10)",
}


def script(cases: dict[str, str]) -> str:
    return f"{HEAD}attempt({cases!r})\n"


@pytest.mark.parametrize("setting", ["on", *slow("off")])
def test_wrong_labels_and_indices_are_an_error_of_python_that_names_them(interpreters, setting):
    cases = {name: code for name, (code, _) in WRONG.items()}
    guards = {**dict.fromkeys(ALL, setting)}
    ran = interpreters.run(script(cases) + "show()", hooks={"guards": guards}, RANK="3")
    found = json.loads(ran.out)
    for name, (_, text) in WRONG.items():
        kind, message, has_our_frame = found[name]
        assert (text in message) is (setting == "on"), (name, message)
        assert message.endswith(" (rank 3)") is (setting == "on")
        assert not has_our_frame or sys.version_info < (3, 11)
        if setting == "on":
            assert kind == ("ValueError" if name in ("shape", "classes last") else "IndexError")


@pytest.mark.slow
def test_what_is_right_or_cannot_be_looked_at_passes_with_the_same_results(interpreters):
    code = script(RIGHT) + "train()\nshow()"
    on = interpreters.run(code, hooks={"guards": ALL}, RANK="0")
    off = interpreters.run(code, hooks={"guards": dict.fromkeys(ALL, "off")}, RANK="0")
    assert json.loads(on.out) == json.loads(off.out)
    assert {name: found for name, found in json.loads(on.out).items() if found != "fine"} == {
        "losses": json.loads(off.out)["losses"]
    }
    assert on.messages() == []


COMPILED = f"""{HEAD}
import torch._dynamo
told = torch._dynamo.explain(M())(labels % 5)
print(told.graph_break_count, told.graph_count)
"""


@pytest.mark.slow
def test_compiled_code_has_no_graph_break_and_no_check(interpreters):
    ran = interpreters.run(COMPILED, hooks={"guards": ALL}, RANK="0")
    assert ran.out == "0 1\n", ran.err


def test_after_a_failure_of_the_gpu_no_check_touches_it_and_the_error_is_the_scripts(interpreters):
    script = """
touched = []
def broken(*_):
    touched.append(1)
    raise RuntimeError("CUDA error: device-side assert triggered\\n" + "x" * 400)
torch.Tensor.__lt__ = broken
for _ in range(3):
    F.cross_entropy(logits, labels % 10)
    F.embedding(torch.tensor([1]), torch.ones(5, 3))
print(len(touched))
"""
    ran = interpreters.run(HEAD + script, hooks={"guards": ALL})
    assert (ran.out, ran.err) == ("1\n", "")
