"""A training whose weights tell whether every step was done once, and begun from the right place.

    exact_job.py --out=DIR --saves=DIR [--steps=N] [--step-s=S] [--saver=first|each] [--direct]
        [--over=gloo|store|adam] [--resume=self] [--from=CHECKPOINT]

The weights are four integers. In each step every shard of the data gives a number that is a hash of
the step, of the shard and of the weights that this rank has; the sum of all shards changes all
weights, and no two steps can be exchanged. The shards are dealt to the ranks that there are, so the
number of ranks changes nothing. A rank that begins at another step, or from other weights, changes
the sum, and with it the weights of all ranks from there on. Nothing here notices that: as in most
programs, all ranks stop when rank 0 has done its last step.

Every `EVERY` steps rank 0 (`first`) or the first rank of each node (`each`) saves to --saves, by
way of another name or, with --direct, as it comes. With --from it goes on from there; with
--resume=self from the newest whole checkpoint that it finds. DIR/audit has a line of JSON for each
begin, each step of rank 0 and each end; DIR/final gets the weights of rank 0.

Over the store nothing of torch is imported but its binary module, which costs a third of the time.
`adam` is gloo with an optimizer that counts the steps, and is loaded, as that of most programs.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import io
import json
import os
import socket
import sys
import time
import types
import zipfile
from pathlib import Path

SHARDS, EVERY, WORD = 12, 5, 1 << 64
FACTOR = 6364136223846793005  # odd, so that no two weights become one
BEGIN = [1, 2, 3, 4]
WAIT = datetime.timedelta(seconds=600)  # for the other ranks
WRITES_S = 0.2  # between the two halves of a checkpoint


def share(weights: list[int], step: int, shards: range) -> int:
    """Return what some shards of the data give in a step."""
    text = json.dumps([weights, step])
    parts = (hashlib.sha256(f"{text} {shard}".encode()).digest()[:8] for shard in shards)
    return sum(int.from_bytes(part, "big") for part in parts) % WORD


def changed(weights: list[int], step: int, total: int) -> list[int]:
    """Return the weights after a step in which all shards gave this sum."""
    return [(w * FACTOR + total * (i + 1) + step) % WORD for i, w in enumerate(weights)]


def trained(steps: int) -> list[int]:
    """Return the weights after so many undisturbed steps."""
    weights = BEGIN
    for step in range(1, steps + 1):
        weights = changed(weights, step, share(weights, step, range(SHARDS)))
    return weights


class Gloo:
    """The ranks, as torch's process group joins them."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo", timeout=WAIT)

    def total(self, *values: int) -> list[int]:
        """Return the sums over all ranks."""
        signed = [v - WORD if v >= WORD // 2 else v for v in values]
        tensor = self._torch.tensor(signed, dtype=self._torch.int64)
        self._dist.all_reduce(tensor)
        return [int(v) % WORD for v in tensor.tolist()]

    def load(self, step: int) -> None:
        """Go on after a step."""

    def step(self) -> None:
        """Count one."""

    def end(self) -> None:
        """Leave."""
        self._dist.destroy_process_group()


class Adam(Gloo):
    """The same, with an optimizer."""

    def load(self, step: int) -> None:
        """Load what an optimizer has saved after a step."""
        weight = self._torch.nn.Parameter(self._torch.zeros(1))
        weight.grad = self._torch.ones(1)
        self._adam = self._torch.optim.Adam([weight])
        if step:
            state = {"step": self._torch.tensor(float(step)), "exp_avg": self._torch.zeros(1)}
            state["exp_avg_sq"] = self._torch.zeros(1)
            groups = self._adam.state_dict()["param_groups"]
            self._adam.load_state_dict({"state": {0: state}, "param_groups": groups})

    def step(self) -> None:
        """Make a step of the optimizer."""
        self._adam.step()


class Store:
    """The ranks, joined by the store that torch's process group would begin with."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("torch")
        for name in ("torch", "torch.distributed"):
            sys.modules[name] = types.ModuleType(name)
        sys.modules["torch"].__path__ = spec.submodule_search_locations
        sys.modules["torch"].distributed = sys.modules["torch.distributed"]
        from torch import _C as BINARY

        BINARY._c10d_init()
        environ = os.environ
        hosts = environ["RANK"] == "0" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        self._store = BINARY._distributed_c10d.TCPStore(*address, None, hosts, WAIT)
        self._rank, self._world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        # As torch's own keys begin (torch.distributed.rendezvous, the handler of env://).
        self._head = f"/worker/attempt_{environ['TORCHELASTIC_RESTART_COUNT']}/exact"
        self._count = 0

    def total(self, *values: int) -> list[int]:
        """Return the sums over all ranks: in the order of the calls, as a collective."""
        self._count += 1
        keys = [f"{self._head}/{self._count}/{rank}" for rank in range(self._world)]
        self._store.set(keys[self._rank], json.dumps(values))
        self._store.wait(keys)
        found = [json.loads(value) for value in self._store.multi_get(keys)]
        return [sum(column) % WORD for column in zip(*found, strict=True)]

    def load(self, step: int) -> None:
        """Go on after a step."""

    def step(self) -> None:
        """Count one."""

    def end(self) -> None:
        """Leave after the others where the store is rank 0's own."""
        left = self._store.add(f"{self._head}/left", 1)
        while self._rank == 0 and left < self._world:
            time.sleep(0.05)
            left = self._store.add(f"{self._head}/left", 0)


JOINED = {"gloo": Gloo, "store": Store, "adam": Adam}


def saved(path: Path) -> tuple[int, list[int]]:
    """Return the step and the weights of a checkpoint."""
    with zipfile.ZipFile(path) as file:
        step, weights = json.loads(file.read("weights"))
        return step, weights


def save(folder: Path, step: int, weights: list[int], *, direct: bool) -> None:
    """Write a checkpoint in two halves; its directory, by which it is whole, is in the second."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("weights", json.dumps([step, weights]))
    data, path = content.getvalue(), folder / f"step-{step}.zip"
    draft = path if direct else path.with_suffix(f".{socket.gethostname()}.new")
    with draft.open("wb") as out:
        out.write(data[: len(data) // 2])
        out.flush()
        time.sleep(WRITES_S)
        out.write(data[len(data) // 2 :])
    draft.replace(path)


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint."""
    whole = (path for path in folder.glob("step-*.zip") if zipfile.is_zipfile(path))
    return max(whole, key=lambda path: int(path.stem[5:]), default=None)


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--saves", type=Path)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--step-s", type=float, default=0.25)
    parser.add_argument("--saver", choices=["first", "each"], default="first")
    parser.add_argument("--direct", action="store_true")
    parser.add_argument("--over", choices=list(JOINED), default="gloo")
    parser.add_argument("--resume", choices=["self", "no"], default="no")
    parser.add_argument("--from", dest="start", type=Path)
    return parser.parse_args()


def main() -> None:
    """Train."""
    options = parsed()
    environ = os.environ
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    saver = rank == 0 if options.saver == "first" else environ["LOCAL_RANK"] == "0"
    log = os.open(options.out / "audit", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def note(event: str, **facts: object) -> None:
        own = {"event": event, "at": time.time(), "group": group, "rank": rank, **facts}
        os.write(log, json.dumps(own).encode() + b"\n")

    ranks = JOINED[options.over]()
    start = options.start or (newest(options.saves) if options.resume == "self" else None)
    step, weights = saved(start) if start else (0, BEGIN)
    own = int.from_bytes(os.urandom(7), "big"), step
    group, leader = ranks.total(*(own if rank == 0 else (0, 0)))  # the last step of rank 0
    facts = {"attempt": environ.get("SAFERUN_ATTEMPT"), "world": world, "pid": os.getpid()}
    note("begin", step=step, start=str(start), host=socket.gethostname(), **facts)
    ranks.load(step)
    while leader < options.steps:
        step += 1
        here = share(weights, step, range(rank, SHARDS, world))
        total, leader = ranks.total(here, step if rank == 0 else 0)
        weights = changed(weights, step, total)
        ranks.step()
        if rank == 0:
            note("step", step=step)
            print(f"step {step} loss {1 / step:.3f}", flush=True)
        if saver and step % EVERY == 0:
            save(options.saves, step, weights, direct=options.direct)
        time.sleep(options.step_s)
    if rank == 0:
        (options.out / "final").write_text(json.dumps([step, weights]), encoding="utf-8")
    note("end", step=step, weights=weights)
    ranks.end()


if __name__ == "__main__":
    main()
