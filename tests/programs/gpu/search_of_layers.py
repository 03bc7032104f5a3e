"""A search whose trials run a layer each, and fail the GPU in many ways.

    search_of_layers.py DATABASE TRIALS [DEVICE]

A trial with ids or labels out of range asserts in a kernel; its layer is the next call of CUDA, and
meets the error by words of its own. A trial that is out of memory asks for too much itself, or has
filled the GPU before its layer. Prints a JSON object for each trial at the end.
"""

import json
import sys

import optuna
import torch
from torch.nn import functional

optuna.logging.set_verbosity(optuna.logging.ERROR)
database, trials = sys.argv[1], int(sys.argv[2])
device = sys.argv[3] if len(sys.argv) > 3 else "cuda"
WAYS = ["", "", "", "", "", "ids", "labels", "memory", "full", "shape", "late"]


class ShapeError(Exception):
    """The parameters do not fit each other."""


@torch.compile
def compiled(x):
    return torch.sin(x).mul(2).sum(dim=-1).relu()


def embedding(x):
    table = torch.ones(64, 8, device=device, requires_grad=True)
    out = functional.embedding(torch.arange(8, device=device), table)
    torch.optim.Adam([table], fused=device == "cuda").zero_grad()
    return out * x.mean()


def linear(x):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    loss = model.to(device)(x).pow(2).mean()
    loss.backward()
    return loss


def conv(x):
    weight = torch.ones(4, 1, 3, 3, device=device)
    return functional.conv2d(x.reshape(1, 1, 64, 64), weight)


def fft(x):
    return torch.fft.fft2(x).abs()


def attention(x):
    q = x.reshape(1, 4, 16, 64).to(torch.bfloat16)
    return functional.scaled_dot_product_attention(q, q, q)


def solver(x):
    return torch.linalg.eigvalsh(x @ x.T + torch.eye(64, device=device))


def batched(x):
    return torch.bmm(x.reshape(4, 16, 64), x.reshape(4, 64, 16))


LAYERS = {f.__name__: f for f in (embedding, linear, conv, fft, attention, solver, batched)}
LAYERS["compiled"] = compiled


def fill():
    """Take what the GPU has left, but for a few MiB."""
    held, size = [], torch.cuda.mem_get_info()[0]
    while size > 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    return held


def break_gpu(way):
    """Start a kernel that asserts; whoever asks the GPU next is told."""
    if way == "ids":
        table = torch.ones(16, 8, device=device)
        functional.embedding(torch.tensor([3, 99], device=device), table)
    elif way == "labels":
        logits = torch.ones(4, 10, device=device)
        functional.cross_entropy(logits, torch.tensor([1, 2, 3, 77], device=device))


def objective(trial):
    layer = trial.suggest_categorical("layer", list(LAYERS))
    way = WAYS[trial.suggest_int("way", 0, len(WAYS) - 1)]
    x = trial.suggest_float("x", 0.1, 2)
    data = torch.full((64, 64), x, device=device)
    break_gpu(way)
    held = fill() if way == "full" else []
    if way == "memory":
        held.append(torch.empty(1 << 44, dtype=torch.uint8, device=device))
    if way == "shape":
        try:
            functional.linear(data, torch.ones(3, 5, device=device))
        except RuntimeError as error:
            raise ShapeError from error
    value = float(LAYERS[layer](data).float().mean())
    if way == "late":  # the value is there already; the kernel comes afterwards
        break_gpu("ids")
    del held
    return value


study = optuna.create_study(
    storage=f"sqlite:///{database}",
    study_name="layers",
    sampler=optuna.samplers.RandomSampler(seed=5),
)
for layer in LAYERS:  # ten errors in a row would be taken for the script's own
    for way in ("ids", "", "labels", "full"):
        study.enqueue_trial({"layer": layer, "way": WAYS.index(way)})
study.optimize(objective, n_trials=trials, catch=(ShapeError,))
for trial in study.get_trials():
    told = {"number": trial.number, "state": trial.state.name, "attributes": trial.user_attrs}
    way = WAYS[trial.params["way"]] if "way" in trial.params else "?"
    print(json.dumps({**told, **trial.params, "way": way}))
