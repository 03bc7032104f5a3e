"""A small training with a framework, which fails in the way that the second argument names."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
FRAMEWORK, HOW = sys.argv[1:3]
FOLDER = Path(os.environ.get("RECORD_FOLDER", tempfile.gettempdir()))
CLASSES = 3


class Records(Dataset[dict[str, torch.Tensor]]):
    """Items; some are wrong where the way to fail asks for it."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        late = index % 16 == 11
        if late and HOW == "worker-raises":
            raise ValueError(f"could not decode image {index}")
        if late and HOW == "worker-killed":
            os.kill(os.getpid(), signal.SIGKILL)
        label = 7 if late and HOW == "label" else index % CLASSES
        return {"x": torch.ones(4), "labels": torch.tensor(label)}


class Model(nn.Module):
    """A classifier with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, CLASSES), nn.Linear(4, 4)
        if HOW != "unused":
            del self.unused
        self.steps = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        if self.steps == 3:
            strike()
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def strike() -> None:
    """Fail in the middle of a step."""
    if HOW == "sigkill" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "one-rank" and RANK == 1:
        raise KeyError("attention_mask")
    if HOW == "memory":
        torch.ones(1 << 50)


def trainer() -> None:
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainingArguments

    command_line = {"loggging_steps": 1} if HOW == "argument" else {"logging_steps": 1}
    workers = 1 if HOW.startswith("worker") else 0
    arguments = TrainingArguments(
        str(FOLDER / "out"), use_cpu=True, max_steps=8, per_device_train_batch_size=4,
        dataloader_num_workers=workers, report_to=[], save_strategy="no", **command_line,
    )  # fmt: skip
    made = Trainer(model=Model(), args=arguments, train_dataset=Records())
    if HOW == "checkpoint":
        folder = FOLDER / f"checkpoint-{RANK}"
        folder.mkdir()
        (folder / "pytorch_model.bin").write_bytes(b"PK")
        (folder / "trainer_state.json").write_text("{}", encoding="utf-8")
        made.train(resume_from_checkpoint=str(folder))
    made.train()


def lightning() -> None:
    """Lightning's Trainer."""
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            if HOW == "nan":
                return self.model(**batch)["loss"] * float("nan")
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    workers = 1 if HOW.startswith("worker") else 0
    loader = DataLoader(Records(), batch_size=4, num_workers=workers)
    devices = 3 if HOW == "devices" else 2
    made = pl.Trainer(
        accelerator="cuda" if HOW == "cuda" else "cpu", devices=devices, strategy="ddp",
        max_steps=8, logger=False, enable_checkpointing=False, detect_anomaly=HOW == "nan",
        default_root_dir=str(FOLDER),
    )  # fmt: skip
    path = None
    if HOW == "checkpoint":
        path = FOLDER / f"last-{RANK}.ckpt"
        torch.save({"state_dict": {"other": torch.ones(1)}, "pytorch-lightning_version": "2.0.0",
                    "epoch": 0, "global_step": 0, "loops": {}, "optimizer_states": [],
                    "lr_schedulers": []}, path)  # fmt: skip
    made.fit(Module(), loader, ckpt_path=path)


def accelerate() -> None:
    """Accelerate's loop."""
    from accelerate import Accelerator

    helper = Accelerator(cpu=True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = 1 if HOW.startswith("worker") else 0
    loader = DataLoader(Records(), batch_size=4, num_workers=workers)
    model, optimizer, loader = helper.prepare(model, optimizer, loader)
    if HOW == "checkpoint":
        helper.load_state(str(FOLDER / "nowhere"))
    for step, batch in enumerate(loader):
        loss = model(**batch)["loss"]
        helper.backward(loss)
        optimizer.step()
        helper.print(f"step {step} loss {loss.item():.4f}")


def deepspeed() -> None:
    """DeepSpeed's engine."""
    import deepspeed as ds

    batch = 7 if HOW == "argument" else 8
    config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": 4,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "zero_optimization": {"stage": 9 if HOW == "stage" else 0}}  # fmt: skip
    ds.init_distributed("gloo")
    model = Model()
    engine, _, loader, _ = ds.initialize(
        model=model, config=config, model_parameters=model.parameters(), training_data=Records()
    )
    if HOW == "checkpoint":
        engine.load_checkpoint(str(FOLDER), tag="nowhere", load_module_strict=True)
        engine.load_checkpoint(str(FOLDER / "nowhere"), tag="global_step8")
    for batch_ in loader:
        loss = engine(**batch_)["loss"]
        engine.backward(loss)
        engine.step()
        print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    {"trainer": trainer, "lightning": lightning, "accelerate": accelerate, "deepspeed": deepspeed}[
        FRAMEWORK
    ]()
