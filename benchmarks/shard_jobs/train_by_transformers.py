"""Train by transformers' Trainer; KIND is which: "Trainer", or "Own" with a loader of its own."""

# ruff: noqa: F821 - what stands before it gives the names that it lacks
import torch
from transformers import Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    rows = torch.randn(320, 4, generator=torch.Generator().manual_seed(4))

    def __len__(self):
        return 320

    def __getitem__(self, n):
        return {"x": self.rows[n], "labels": self.rows[n].sum()}


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.inner(x).squeeze(-1) - labels).pow(2).mean()}


class Own(Trainer):
    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, 4)  # here


arguments = TrainingArguments(
    output_dir="trained",
    use_cpu=True,
    per_device_train_batch_size=4,
    max_steps=20,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    logging_strategy="no",
    seed=7,
)
{"Trainer": Trainer, "Own": Own}[KIND](Net(), arguments, train_dataset=Rows()).train()
