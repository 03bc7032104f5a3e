"""Guards where they matter: the error is Python's, and the CUDA context still works."""

from __future__ import annotations

import pytest

FAULTS = {
    "label": "loss = F.cross_entropy(torch.randn(8, 10, device='cuda'), ids % 13)  # here",
    "token": "loss = torch.nn.Embedding(10, 4, device='cuda')(ids % 13).sum()  # here",
}
BODY = """
import json, os, torch, torch.nn.functional as F
ids = torch.arange(8, device="cuda") + 5
try:
    {fault}
    torch.cuda.synchronize()
except IndexError as error:
    print(json.dumps(dict(error=str(error), after=float(torch.ones(2, device="cuda").sum()))))
"""
GUARDS = ("--set", "hooks.guards.labels=on", "--set", "hooks.guards.embeddings=on")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_error_is_pythons_and_the_context_works_after_it(gpus, saferun, fault):
    done = saferun(BODY.format(fault=FAULTS[fault]), *GUARDS)
    assert done.code == 0, done.err[-3000:]
    (told,) = done.told
    assert "10, 11, 12" in told["error"]
    assert told["after"] == 2.0


@pytest.mark.parametrize("fault", FAULTS)
def test_the_diagnosing_attempt_names_the_line_and_the_values(gpus, saferun, fault):
    script = BODY.format(fault=FAULTS[fault]).replace("except IndexError", "except KeyError")
    done = saferun(script, "--set", "retry.debug_last=true")
    assert done.code == 1
    assert "device-side-assert" in done.err
    assert "10, 11, 12" in done.err.split("the run failed")[1]


STEPS = """
import json, time, torch, torch.nn.functional as F
net = torch.nn.Sequential(torch.nn.Embedding(50304, 768), *[torch.nn.TransformerEncoderLayer(
    768, 12, 3072, batch_first=True, dropout=0.0) for _ in range(12)], torch.nn.Linear(768, 50304))
net = net.cuda().bfloat16()
optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
ids = torch.randint(0, 50304, (16, 1024), device="cuda")
def step():
    F.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
    optimizer.step(); optimizer.zero_grad()
for _ in range(5): step()
times = []
for _ in range(9):
    torch.cuda.synchronize(); start = time.perf_counter(); step()
    torch.cuda.synchronize(); times.append(time.perf_counter() - start)
print(json.dumps(dict(median_ms=1000 * sorted(times)[4])))
"""


def test_steps_are_timed_with_and_without_guards(gpus, saferun, capsys):
    """Prints the ratio for RESULTS.md; no test asserts a duration."""
    pairs = []
    for _ in range(9):
        on, off = (saferun(STEPS, *words).told[0]["median_ms"] for words in (GUARDS, ()))
        pairs.append(on / off)
    with capsys.disabled():
        print(f"\nguards: median ratio of nine pairs {sorted(pairs)[4]:.4f} ({pairs})")
