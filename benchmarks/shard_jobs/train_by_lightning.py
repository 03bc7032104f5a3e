"""Train by Lightning; SHARD is whether it puts its own sampler in."""

# ruff: noqa: F821 - what stands before it gives the names that it lacks
import lightning
import torch


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def training_step(self, batch, n):
        return self.inner(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


rows = torch.randn(320, 4, generator=torch.Generator().manual_seed(4))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), 4, shuffle=SHARD)  # here
lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_steps=20,
    logger=False,
    barebones=True,
    use_distributed_sampler=SHARD,
).fit(Net(), loader)
