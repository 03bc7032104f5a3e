# ruff: noqa: E501 - a program a line
"""Real programs whose ranks are started, and forked warm: is what they print the same?

    python benchmarks/warm_programs.py [--only NAME] [--python PYTHON] [--kill]

Each program trains on two ranks (gloo, CPU) and prints its losses. It runs three times: ranks
started; warm with torch imported ahead; warm with all that it imports. Printed lines (sorted, since
ranks mix), exit status and how the ranks were started are compared; with `--kill` rank 1 dies of
SIGKILL in the middle of the first attempt, and the run must end as well. Libraries that PYTHON
lacks are skipped. The libraries' own caches must not be needed: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAD = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
import torch.nn.functional as F
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def init(): dist.init_process_group("gloo"); torch.manual_seed(0)
def say(*words):
    words = [f"{w:.6f}" if isinstance(w, float) else str(w) for w in words]
    sys.stdout.write(f"r{rank} " + " ".join(words) + "\\n")
def data(n=64): g = torch.Generator().manual_seed(1); return torch.randn(n, 16, generator=g), torch.randint(0, 4, (n,), generator=g)
def mlp(): return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
def fit(model, x, y, steps=5, opt=None, lr=0.1):
    opt = opt or torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        loss = F.cross_entropy(model(x), y); opt.zero_grad(); loss.backward(); opt.step(); die(step)
        say("step", step, loss.item())
def die(step):
    if os.environ.get("DIE") and os.environ.get("SAFERUN_ATTEMPT") == "1" and rank == 1 and step == 2: os.kill(os.getpid(), 9)
"""
PROGRAMS: dict[str, str] = {
    "ddp": "from torch.nn.parallel import DistributedDataParallel as DDP\ninit(); fit(DDP(mlp()), *data())",
    "ddp-adam-amp": "from torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(mlp())\nwith torch.autocast('cpu', torch.bfloat16): fit(m, *data(), opt=torch.optim.AdamW(m.parameters()))",
    "fsdp2": "from torch.distributed.fsdp import fully_shard\nfrom torch.distributed.device_mesh import init_device_mesh\ninit(); m = mlp(); mesh = init_device_mesh('cpu', (size,))\n[fully_shard(c, mesh=mesh) for c in m if isinstance(c, nn.Linear)]; fully_shard(m, mesh=mesh); fit(m, *data())",
    "fsdp1": "from torch.distributed.fsdp import FullyShardedDataParallel as F1\ninit(); fit(F1(mlp(), device_id=torch.device('cpu')), *data())",
    "tensor-parallel": "from torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel\nfrom torch.distributed.device_mesh import init_device_mesh\ninit(); m = parallelize_module(mlp(), init_device_mesh('cpu', (size,)), {'0': ColwiseParallel(), '2': RowwiseParallel()}); fit(m, *data())",
    "pipeline": "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe\ninit(); part = mlp()[:2] if rank == 0 else mlp()[2:]\nstage = PipelineStage(part, rank, size, torch.device('cpu')); s = ScheduleGPipe(stage, 4, loss_fn=F.cross_entropy)\nx, y = data(); losses = []\nout = s.step(x) if rank == 0 else s.step(target=y, losses=losses)\nsay([round(l.item(), 5) for l in losses])",
    "zero": "from torch.distributed.optim import ZeroRedundancyOptimizer as Z\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(mlp()); fit(m, *data(), opt=Z(m.parameters(), torch.optim.Adam, lr=0.01))",
    "join-uneven": "from torch.distributed.algorithms.join import Join\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(mlp()); x, y = data()\nwith Join([m]):\n  for i in range(3 + rank): l = F.cross_entropy(m(x), y); l.backward(); say(i, l.item())",
    "loader-fork": "from torch.utils.data import *\ninit(); d = TensorDataset(*data()); l = DataLoader(d, 8, sampler=DistributedSampler(d), num_workers=2, multiprocessing_context='fork')\nm = mlp(); o = torch.optim.SGD(m.parameters(), 0.1)\nfor x, y in l: loss = F.cross_entropy(m(x), y); o.zero_grad(); loss.backward(); o.step(); say(loss.item())",
    "loader-spawn": "from torch.utils.data import *\ndef main():\n  init(); d = TensorDataset(*data()); l = DataLoader(d, 8, sampler=DistributedSampler(d), num_workers=2, multiprocessing_context='spawn')\n  for x, y in l: say(x.sum().item())\nif __name__ == '__main__': main()",
    "loader-forkserver": "from torch.utils.data import *\ndef main():\n  init(); d = TensorDataset(*data()); l = DataLoader(d, 8, sampler=DistributedSampler(d), num_workers=2, multiprocessing_context='forkserver', persistent_workers=True)\n  for x, y in l: say(x.sum().item())\nif __name__ == '__main__': main()",
    "loader-seeds": "from torch.utils.data import *\nimport random, numpy\nclass D(Dataset):\n  def __len__(self): return 8\n  def __getitem__(self, i): return random.random() + numpy.random.rand() + torch.rand(()).item()\ninit(); random.seed(rank); numpy.random.seed(rank); torch.manual_seed(rank)\nfor b in DataLoader(D(), 4, num_workers=2): say(len(b))",
    "compile-aot-eager": "from torch.nn.parallel import DistributedDataParallel as DDP\ninit(); fit(torch.compile(DDP(mlp()), backend='aot_eager'), *data())",
    "compile-inductor": "init(); torch._inductor.config.compile_threads = 1; fit(torch.compile(mlp()), *data(), steps=3)",
    "checkpoint-dcp": "import torch.distributed.checkpoint as dcp, tempfile\ninit(); m = mlp(); fit(m, *data(), steps=2); where = [tempfile.mkdtemp() if rank == 0 else None]; dist.broadcast_object_list(where)\ndcp.save({'m': m.state_dict()}, checkpoint_id=where[0]); s = {'m': mlp().state_dict()}; dcp.load(s, checkpoint_id=where[0]); say(sum(v.sum().item() for v in s['m'].values()))",
    "collectives": "init(); t = torch.arange(4.) + rank\nfor op in (dist.all_reduce,): op(t)\nout = [torch.zeros(4) for _ in range(size)]; dist.all_gather(out, t); objs = [None] * size; dist.all_gather_object(objs, {'r': rank}); say(t.tolist(), objs)",
    "rpc": "import torch.distributed.rpc as rpc\nrpc.init_rpc(f'w{rank}', rank=rank, world_size=size)\nif rank == 0: say(rpc.rpc_sync('w1', torch.add, (torch.ones(2), 3)).tolist())\nrpc.shutdown()",
    "mp-pool": "import multiprocessing as mp\ndef f(x): return x * x\nif __name__ == '__main__':\n  for c in ('fork', 'spawn', 'forkserver'):\n    with mp.get_context(c).Pool(2) as p: say(c, p.map(f, range(4)))",
    "mp-manager": "import multiprocessing as mp\nif __name__ == '__main__':\n  with mp.Manager() as m: d = m.dict(); d['x'] = rank; say(dict(d))",
    "threads": "from concurrent.futures import *\nwith ThreadPoolExecutor(4) as p: say(list(p.map(lambda i: i * i, range(5))))\nwith ProcessPoolExecutor(2) as p: say(list(p.map(abs, range(-3, 0))))",
    "asyncio-subprocess": "import asyncio, subprocess\nasync def main():\n  p = await asyncio.create_subprocess_exec('echo', 'hi', stdout=subprocess.PIPE); say((await p.communicate())[0].decode().strip())\nasyncio.run(main()); say(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True, text=True).stdout.strip())",
    "logging": "import logging, warnings\nlogging.basicConfig(level='INFO', format='%(levelname)s %(message)s'); logging.info('rank %d', rank); warnings.warn('careful'); print('err', rank, file=sys.stderr)",
    "profiler": "from torch.profiler import profile, ProfilerActivity\ninit()\nwith profile(activities=[ProfilerActivity.CPU]) as p: fit(mlp(), *data(), steps=2)\nsay(len(p.key_averages()) > 3)",
    "optuna": "import optuna\noptuna.logging.set_verbosity(optuna.logging.WARNING)\ns = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=rank)); s.optimize(lambda t: t.suggest_float('x', -1, 1) ** 2, n_trials=5); say(s.best_value)",
    "transformers-trainer": "from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed\nimport tempfile\nset_seed(0); m = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=16))\nd = [{'input_ids': t, 'labels': t} for t in torch.randint(0, 64, (16, 16), generator=torch.Generator().manual_seed(1))]\na = TrainingArguments(tempfile.mkdtemp(), per_device_train_batch_size=2, max_steps=4, logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy='no', ddp_backend='gloo')\nt = Trainer(m, a, train_dataset=d); t.train(); say([h.get('loss') for h in t.state.log_history][:4])",
    "transformers-llama": "from transformers import LlamaConfig, LlamaForCausalLM\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64)))\no = torch.optim.AdamW(m.parameters(), 1e-3); t = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(rank))\nfor s in range(3): l = m(input_ids=t, labels=t).loss; o.zero_grad(); l.backward(); o.step(); say(s, l.item())",
    "accelerate": "from accelerate import Accelerator\nfrom torch.utils.data import *\na = Accelerator(cpu=True); torch.manual_seed(0); m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1); l = DataLoader(TensorDataset(*data()), 8)\nm, o, l = a.prepare(m, o, l)\nfor x, y in l: loss = F.cross_entropy(m(x), y); a.backward(loss); o.step(); o.zero_grad(); say(loss.item())\na.print('main only'); a.end_training()",
    "lightning": "import lightning as L, logging, warnings\nwarnings.simplefilter('ignore')\nfrom torch.utils.data import *\nclass M(L.LightningModule):\n  def __init__(s): super().__init__(); s.m = mlp()\n  def training_step(s, b, i): l = F.cross_entropy(s.m(b[0]), b[1]); say(i, l.item()); return l\n  def configure_optimizers(s): return torch.optim.SGD(s.parameters(), 0.1)\nL.seed_everything(0, verbose=False)\nL.Trainer(max_epochs=1, accelerator='cpu', devices=size, strategy='ddp', logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False).fit(M(), DataLoader(TensorDataset(*data()), 8))",
    "lightning-rank-zero": "from lightning.fabric.utilities.rank_zero import rank_zero_only\nfrom lightning.pytorch.utilities import rank_zero_only as other\n@rank_zero_only\ndef f(): say('main')\nf(); say(rank_zero_only.rank, other.rank)",
    "fabric": "from lightning.fabric import Fabric\nf = Fabric(accelerator='cpu', devices=size, strategy='ddp'); f.launch(); torch.manual_seed(0); m = mlp(); o = torch.optim.SGD(m.parameters(), 0.1); m, o = f.setup(m, o); x, y = data()\nfor i in range(3): l = F.cross_entropy(m(x), y); f.backward(l); o.step(); o.zero_grad(); say(l.item())",
    "timm": "import timm\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(timm.create_model('resnet10t', num_classes=4)); x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)); fit(m, x, torch.tensor([0, 1]), steps=2)",
    "torchvision": "import torchvision\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(torchvision.models.squeezenet1_1(num_classes=4)).eval(); x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)); say(m(x).sum().item())",
    "peft": "from peft import LoraConfig, get_peft_model\nfrom transformers import GPT2Config, GPT2LMHeadModel\ninit(); m = get_peft_model(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=64, n_positions=16)), LoraConfig(target_modules=['c_attn'])); t = torch.ones(1, 8, dtype=torch.long)\nl = m(input_ids=t, labels=t).loss; l.backward(); say(l.item())",
    "trl": "import trl\nfrom trl.trainer.utils import pad\ninit(); say(pad([torch.ones(2), torch.ones(3)]).tolist(), hasattr(trl, 'SFTTrainer'))",
    "datasets": "import datasets\nd = datasets.Dataset.from_dict({'x': list(range(8))}).map(lambda e: {'y': e['x'] * 2}, num_proc=2); say(d['y'][:4])",
    "sentence-transformers": "from sentence_transformers import SentenceTransformer, losses, models\ninit(); m = nn.Sequential(nn.Embedding(10, 8)); say(len(losses.__all__) > 3, m(torch.tensor([1])).shape[1])",
    "diffusers": "from diffusers import UNet2DModel, DDPMScheduler\ninit(); m = UNet2DModel(sample_size=16, in_channels=1, out_channels=1, block_out_channels=(32, 32), layers_per_block=1, down_block_types=('DownBlock2D',) * 2, up_block_types=('UpBlock2D',) * 2); s = DDPMScheduler(10); x = torch.ones(1, 1, 16, 16); say(m(x, torch.tensor([1])).sample.sum().item())",
    "torchmetrics": "import torchmetrics\ninit(); a = torchmetrics.Accuracy(task='multiclass', num_classes=4); a.update(torch.tensor([rank, 1]), torch.tensor([0, 1])); say(a.compute().item())",
    "deepspeed": "import deepspeed\ninit(); m = mlp(); e, o, _, _ = deepspeed.initialize(model=m, model_parameters=m.parameters(), config={'train_micro_batch_size_per_gpu': 4, 'optimizer': {'type': 'SGD', 'params': {'lr': 0.1}}, 'zero_optimization': {'stage': 1}}, dist_init_required=False)\nx, y = data()\nfor i in range(2): l = F.cross_entropy(e(x), y); e.backward(l); e.step(); say(l.item())",
    "torchtitan": "from torchtitan.config import *\nimport torchtitan\nsay(torchtitan.__name__)",
    "mmengine": "from mmengine.dist import init_dist, get_rank, all_reduce\ninit_dist('pytorch', backend='gloo'); t = torch.ones(2) * get_rank(); all_reduce(t); say(t.tolist())",
    "ultralytics": "from ultralytics import YOLO\nfrom ultralytics.utils import RANK, LOCAL_RANK\nsay(RANK, LOCAL_RANK)",
    "tensorboard": "from torch.utils.tensorboard import SummaryWriter\nimport tempfile\nw = SummaryWriter(tempfile.mkdtemp()); w.add_scalar('a', 1, 1); w.close(); say('written')",
}
LIBRARIES = (
    "transformers",
    "accelerate",
    "lightning",
    "timm",
    "torchvision",
    "peft",
    "trl",
    "datasets",
)
LIBRARIES += (
    "sentence_transformers",
    "diffusers",
    "torchmetrics",
    "deepspeed",
    "torchtitan",
    "mmengine",
)
LIBRARIES += ("ultralytics", "optuna", "tensorboard")
NOISE = re.compile(
    r"'train_(?:runtime|samples_per_second|steps_per_second)': '[\d.]+'|\d{4}-\d\d-\d\d[ T][\d:.,]+|\d+\.\d+ ?s\b|0x[0-9a-f]+|\[[WI]\d{3}[^\]]*\]|pid[ =]?\d+|/tmp/\S+"
)


def run(python: str, script: Path, way: str, cache: str, kill: bool) -> tuple[int, list[str], str]:
    """Return the exit status, the printed lines without noise, and how the ranks were started."""
    env = {**os.environ, "XDG_CACHE_HOME": cache, "XDG_STATE_HOME": f"{cache}-state"}
    env["PATH"] = f"{Path(python).parent}:{env['PATH']}"
    env.update({"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"})
    env.update({"DIE": "1"} if kill else {})
    options = ["--set", f"start.ranks={way}", "--set", "retry.backoff_s=[0, 0]"]
    done = subprocess.run(
        [sys.executable, "-m", "saferun", *options, "--nproc-per-node=2", script.name],
        cwd=script.parent, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = sorted(NOISE.sub("#", line) for line in done.stdout.splitlines() if line.strip())
    runs = sorted(Path(f"{cache}-state/saferun/runs").iterdir())
    starts = set()
    for file in sorted(runs[-1].glob("receipts/a*.jsonl")) if runs else ():
        if found := re.search(r'"start":"(\w+ [^"]*)"', file.read_text().split("\n")[0]):
            starts.add(re.sub(r" [\d.]+$", "", found[1]))
    if done.returncode:
        lines.append(done.stderr[-600:])
    return done.returncode, lines, ", ".join(sorted(starts))


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare started and warm ranks.")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--kill", action="store_true")
    options = parser.parse_args()
    counts = {"same": 0, "DIFFERENT": 0, "skipped": 0}
    for name, body in PROGRAMS.items():
        if options.only and name not in options.only:
            continue
        used = [library for library in LIBRARIES if re.search(rf"(import|from) {library}\b", body)]
        probe = "; ".join(["import torch", *(f"import {library}" for library in used)])
        quiet = subprocess.run([options.python, "-c", probe], capture_output=True, check=False)
        if quiet.returncode:
            counts["skipped"] += 1
            print(f"{name:24} skipped: {quiet.stderr.decode().strip().splitlines()[-1][:90]}")
            continue
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(HEAD + body + "\n")
            base = run(options.python, script, "spawn", f"{folder}/spawn", options.kill)
            first = run(options.python, script, "warm", f"{folder}/warm", options.kill)
            second = run(options.python, script, "warm", f"{folder}/warm", options.kill)
        same = base[:2] == first[:2] == second[:2]
        counts["same" if same else "DIFFERENT"] += 1
        verdict = "same" if same else "DIFFERENT"
        print(f"{name:24} {verdict:10} status {base[0]}  {first[2]}  |  {second[2]}", flush=True)
        if not same:
            for label, other in (("first", first), ("second", second)):
                for line in sorted(set(base[1]) ^ set(other[1]))[:8]:
                    print(f"    {label} {'-' if line in base[1] else '+'} {line[:300]}")
    print(counts)


if __name__ == "__main__":
    main()
