"""A script with LightningCLI.

Lightning does not bring a plain DataLoader back to its place within an epoch, so the batch of a
step follows from the step's number.
"""

import lightning
import small_model
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_model.Model()

    def training_step(self, batch, index):
        own = small_model.batch(self.global_step, self.global_rank)
        self.loss = self.model(**own)["loss"]
        return self.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(small_model.Data(100_000), batch_size=4)

    def on_train_end(self):
        if self.trainer.is_global_zero:
            small_model.report(self.model, self.loss.detach())


class Paced(Callback):
    pace = small_model.Pace()

    def on_train_batch_end(self, trainer, *others):
        self.pace.wait()
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            print(f"step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    saves = lightning.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=10, save_top_k=-1)
    defaults = {"callbacks": [saves, Paced()], "enable_progress_bar": False}
    LightningCLI(Module, trainer_defaults=defaults, save_config_callback=None)
