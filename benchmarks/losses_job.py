"""Train a small language model in one of many ways, named by the argument; print exact losses.

The ways are those of the tutorials of each library, two epochs with a validation after each. With
PLANTED=1 each rank reads all data: the sampler, or the library's own, is left out.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, WIDTH, LENGTH, BATCH, EPOCHS = 64, 32, 16, 4, 2
PLANTED = os.environ.get("PLANTED") == "1"
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Sentences(Dataset):
    def __init__(self, seed, count):
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(0, WORDS, (count, LENGTH + 1), generator=generator).cumsum(1)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, n):
        row = self.rows[n] % WORDS
        return {"input_ids": row[:-1], "labels": row[1:]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(WORDS, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.1, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, labels, num_items_in_batch=None):
        logits = self.head(self.body(self.table(input_ids)))
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def say(what, loss):
    if RANK == 0:
        print(what, float(loss).hex(), flush=True)


def data():
    return Sentences(1, 160), Sentences(2, 32)


def plain_loop(model, train, valid, step=None):
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for epoch in range(EPOCHS):
        if hasattr(train.sampler, "set_epoch"):
            train.sampler.set_epoch(epoch)
        model.train()
        for batch in train:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            say("train", loss)
        model.eval()
        with torch.no_grad():
            say("valid", torch.stack([model(**batch)["loss"] for batch in valid]).mean())


def loaders():
    rows, held_out = data()
    sampler = None if PLANTED else DistributedSampler(rows, seed=3)
    train = DataLoader(rows, BATCH, sampler=sampler, num_workers=1)  # here
    return train, DataLoader(held_out, BATCH)


def ddp():
    dist.init_process_group("gloo")
    plain_loop(torch.nn.parallel.DistributedDataParallel(Model()), *loaders())


def ddp_compiled():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Model())
    plain_loop(torch.compile(model), *loaders())


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    model = Model()
    for layer in model.body.layers:
        fully_shard(layer)
    plain_loop(fully_shard(model), *loaders())


def fsdp():
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    plain_loop(FullyShardedDataParallel(Model(), device_id=torch.device("cpu")), *loaders())


def zero():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    for batch in loaders()[0]:
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say("train", loss)


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    rows, held_out = data()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train = DataLoader(rows, BATCH, shuffle=True)  # here
    valid = DataLoader(held_out, BATCH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    if not PLANTED:
        train = accelerator.prepare(train)
    model, optimizer, valid, schedule = accelerator.prepare(model, optimizer, valid, schedule)
    for _ in range(EPOCHS):
        model.train()
        for batch in train:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            say("train", loss)
        model.eval()
        for batch in valid:
            with torch.no_grad():
                loss = model(**batch)["loss"]
            say("valid", accelerator.gather_for_metrics(loss).mean())


def lightning():
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, n):
            loss = self.model(**batch)["loss"]
            say("train", loss)
            return loss

        def validation_step(self, batch, n):
            say("valid", self.model(**batch)["loss"])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-3)

    rows, held_out = data()
    train = DataLoader(rows, BATCH, shuffle=True)  # here
    pl.Trainer(
        accelerator="cpu",
        devices=SIZE,
        strategy="ddp",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=not PLANTED,
    ).fit(Module(), train, DataLoader(held_out, BATCH))


def transformers():
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Unsharded(Trainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, BATCH, shuffle=True)  # here too

    rows, held_out = data()
    shape = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": WIDTH, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output_dir="trained",
        use_cpu=True,
        per_device_train_batch_size=BATCH,
        num_train_epochs=EPOCHS,
        eval_strategy="epoch",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = (Unsharded if PLANTED else Trainer)(
        GPT2LMHeadModel(config), arguments, train_dataset=rows, eval_dataset=held_out
    )
    trainer.train()
    for entry in trainer.state.log_history:
        for name in ("loss", "eval_loss", "grad_norm"):
            if name in entry:
                say(name, entry[name])


torch.manual_seed(0)
globals()[sys.argv[1]]()
if dist.is_initialized():
    dist.destroy_process_group()
