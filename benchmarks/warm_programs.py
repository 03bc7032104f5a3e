# ruff: noqa: E501 - a program a line
"""Real programs whose ranks are started, and forked warm: is what they print the same?

    python benchmarks/warm_programs.py [--only NAME] [--python PYTHON] [--kill]

Each program trains on two ranks (gloo, CPU) and prints its losses. It runs three times: ranks
started; warm with torch imported ahead; warm with all that it imports. Printed lines (sorted, since
ranks mix), exit status and how the ranks were started are compared; with `--kill` rank 1 dies of
SIGKILL in the middle of the first attempt (in its third step, or with its first line), and the run must end as well. Libraries that PYTHON
lacks are skipped. The libraries' own caches must not be needed: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
    if words[0] != "step": die(2)  # a program that does not count steps dies when it first says something
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
    "fsdp2-tp": "from torch.distributed.fsdp import fully_shard\nfrom torch.distributed.tensor.parallel import parallelize_module, ColwiseParallel, RowwiseParallel\nfrom torch.distributed.device_mesh import init_device_mesh\ninit(); mesh = init_device_mesh('cpu', (1, size), mesh_dim_names=('dp', 'tp')); m = parallelize_module(mlp(), mesh['tp'], {'0': ColwiseParallel(), '2': RowwiseParallel()}); fully_shard(m, mesh=mesh['dp']); fit(m, *data())",
    "ddp-comm-hook": "from torch.nn.parallel import DistributedDataParallel as DDP\nfrom torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook\ninit(); m = DDP(mlp()); m.register_comm_hook(None, fp16_compress_hook); fit(m, *data())",
    "activation-checkpoint": "from torch.utils.checkpoint import checkpoint\nfrom torch.nn.parallel import DistributedDataParallel as DDP\nclass C(nn.Module):\n  def __init__(s): super().__init__(); s.m = mlp()\n  def forward(s, x): return checkpoint(s.m, x, use_reentrant=False)\ninit(); fit(DDP(C()), *data())",
    "ema-swa": "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(mlp()); e = AveragedModel(m.module, multi_avg_fn=get_ema_multi_avg_fn(0.9)); fit(m, *data()); e.update_parameters(m.module); say(sum(p.sum().item() for p in e.parameters()))",
    "lbfgs": "init(); m = mlp(); x, y = data(); o = torch.optim.LBFGS(m.parameters(), max_iter=4)\ndef closure(): o.zero_grad(); l = F.cross_entropy(m(x), y); l.backward(); return l\nfor i in range(3): say(i, o.step(closure).item())",
    "functional": "from torch.func import functional_call, vmap, grad\ninit(); m = mlp(); p = dict(m.named_parameters()); x, y = data(8)\nsay(sum(g.sum().item() for g in vmap(grad(lambda q, a, b: F.cross_entropy(functional_call(m, q, (a[None],)), b[None])), in_dims=(None, 0, 0))(p, x, y).values()))",
    "torch-mp-spawn": "import torch.multiprocessing as mp\ndef child(i, q): q.put(i * 2)\nif __name__ == '__main__':\n  q = mp.get_context('spawn').SimpleQueue(); mp.spawn(child, (q,), nprocs=2); say(sorted(q.get() for _ in range(2)))",
    "shared-memory": "from multiprocessing import shared_memory\nm = shared_memory.SharedMemory(create=True, size=16); m.buf[0] = 7; n = shared_memory.SharedMemory(m.name); say(n.buf[0]); n.close(); m.close(); m.unlink()",
    "elastic-record": "from torch.distributed.elastic.multiprocessing.errors import record\n@record\ndef main(): init(); fit(mlp(), *data(), steps=3); sys.exit(3 if rank == 1 and size > 1 else 0)\nmain()",
    "uneven-seeds": "import random, numpy, secrets, uuid, tempfile\ninit(); mine = [random.random(), float(numpy.random.rand()), torch.rand(()).item(), secrets.token_hex(8), str(uuid.uuid4()), next(tempfile._get_candidate_names())]; all = [None] * size; dist.all_gather_object(all, mine); say([len({row[i] for row in all}) for i in range(6)])",
    "numpy-memmap": "import numpy as np, tempfile\nf = tempfile.NamedTemporaryFile(); np.arange(64, dtype='u2').tofile(f.name); d = np.memmap(f.name, dtype='u2', mode='r'); init(); say(int(d[rank::size].sum())); fit(mlp(), *data(), steps=3)",
    "bert": "from transformers import BertConfig, BertForSequenceClassification\nfrom torch.nn.parallel import DistributedDataParallel as DDP\ninit(); m = DDP(BertForSequenceClassification(BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64, num_labels=4))); o = torch.optim.AdamW(m.parameters())\nfor s in range(3): l = m(input_ids=torch.arange(16).view(2, 8), labels=torch.tensor([0, 1])).loss; o.zero_grad(); l.backward(); o.step(); die(s); say(s, l.item())",
    "vit": "from transformers import ViTConfig, ViTForImageClassification\ninit(); m = ViTForImageClassification(ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=16, patch_size=8)); say(m(torch.ones(1, 3, 16, 16)).logits.shape)",
    "t5-generate": "from transformers import T5Config, T5ForConditionalGeneration\ninit(); m = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0)).eval(); say(m.generate(input_ids=torch.arange(8)[None], max_new_tokens=4, do_sample=False).tolist())",
    "accelerate-fsdp2": "from accelerate import Accelerator\nfrom accelerate.utils import set_seed\nset_seed(0); a = Accelerator(cpu=True, gradient_accumulation_steps=2); m, o = a.prepare(mlp(), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)); say(a.gather(torch.tensor([a.process_index])).tolist(), a.num_processes)",
    "pytorch-lightning": "import pytorch_lightning as pl, logging, warnings\nwarnings.simplefilter('ignore')\npl.seed_everything(1); say(pl.utilities.rank_zero.rank_zero_only.rank, torch.rand(()).item())",
    "torch-geometric": "from torch_geometric.nn import GCNConv\ninit(); c = GCNConv(4, 2); say(c(torch.ones(3, 4), torch.tensor([[0, 1], [1, 2]])).shape)",
    "torchaudio": "import torchaudio\ninit(); say(torchaudio.transforms.MelSpectrogram(n_mels=8, n_fft=64)(torch.zeros(1, 256)).shape)",
    "gpytorch": "import gpytorch\ninit(); k = gpytorch.kernels.RBFKernel(); say(float(k(torch.ones(2, 1)).to_dense().sum()))",
    "numpyro-jax": "import jax, jax.numpy as jnp\nsay(float(jnp.arange(4).sum()))",
    "scipy-sklearn": "import scipy.optimize, sklearn.linear_model\nsay(round(float(scipy.optimize.minimize_scalar(lambda x: (x - 2) ** 2).x), 4)); init(); fit(mlp(), *data(), steps=2)",
    "matplotlib": "import matplotlib; matplotlib.use('Agg')\nimport matplotlib.pyplot as plt, io\nf = io.BytesIO(); plt.plot([1, 2]); plt.savefig(f, format='png'); say(f.getbuffer().nbytes > 100)",
    "cuda-product": "init(); d = 'cuda' if torch.cuda.is_available() else 'cpu'; m = mlp().to(d); x, y = data(); fit(m, x.to(d), y.to(d)); say(torch.cuda.is_initialized() == (d == 'cuda'))",
    "nccl-ddp": "from torch.nn.parallel import DistributedDataParallel as DDP\nassert torch.cuda.device_count() >= size, 'too few GPUs'\ntorch.cuda.set_device(rank); dist.init_process_group('nccl'); torch.manual_seed(0); x, y = data(); fit(DDP(mlp().cuda()), x.cuda(), y.cuda()); dist.destroy_process_group()",
    "cuda-compile": "assert torch.cuda.is_available(), 'no GPU'\ninit(); x, y = data(); fit(torch.compile(mlp().cuda()), x.cuda(), y.cuda(), steps=3)",
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
LIBRARIES += ("ultralytics", "optuna", "tensorboard", "pytorch_lightning", "torch_geometric")
LIBRARIES += ("torchaudio", "gpytorch", "jax", "scipy", "sklearn", "matplotlib")
NEEDS = {"nccl-ddp": "assert torch.cuda.device_count() > 1", "cuda-compile": "torch.ones(1).cuda()"}
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
        [sys.executable, "-m", "saferun", *options, *("--standalone", "--nproc-per-node=2"), script.name],
        cwd=script.parent, env=env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    lines = sorted(NOISE.sub("#", line) for line in done.stdout.splitlines() if line.strip())
    runs = sorted(Path(f"{cache}-state/saferun/runs").iterdir())
    starts = set()
    for file in sorted(runs[-1].glob("receipts/a*.jsonl")) if runs else ():
        if found := re.search(r'"start":"(\w+ [^"]*)"', file.read_text().split("\n")[0]):
            starts.add(re.sub(r" [\d.]+$", "", found[1]))
    if done.returncode:
        lines += re.findall(r"the run failed: .*?\(([\w-]+)", done.stderr) or [done.stderr[-600:]]
    return done.returncode, lines, ", ".join(sorted(starts))


def compare(name: str, python: str, kill: bool) -> tuple[str, list[str]]:
    """Return the verdict on a program, and the lines that say it."""
    body = PROGRAMS[name]
    used = [library for library in LIBRARIES if re.search(rf"(import|from) {library}\b", body)]
    probe = "; ".join(["import torch", *(f"import {library}" for library in used)])
    probe += f"; {NEEDS[name]}" if name in NEEDS else ""
    quiet = subprocess.run([python, "-c", probe], capture_output=True, check=False)
    if quiet.returncode:
        why = quiet.stderr.decode().strip().splitlines()[-1][:90]
        return "skipped", [f"{name:24} skipped: {why}"]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(HEAD + body + "\n")
        base = run(python, script, "spawn", f"{folder}/spawn", kill)
        first = run(python, script, "warm", f"{folder}/warm", kill)
        second = run(python, script, "warm", f"{folder}/warm", kill)
    verdict = "same" if base[:2] == first[:2] == second[:2] else "DIFFERENT"
    said = [f"{name:24} {verdict:10} status {base[0]}  {first[2]}  |  {second[2]}"]
    if verdict != "same":
        for label, other in (("first", first), ("second", second)):
            for line in sorted(set(base[1]) ^ set(other[1]))[:8]:
                said.append(f"    {label} {'-' if line in base[1] else '+'} {line[:300]}")
    elif base[0]:
        said.append(f"    fails in all ways: {base[1][-1].strip().splitlines()[-1][:200]}")
    return verdict, said


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare started and warm ranks.")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time")
    options = parser.parse_args()
    counts = {"same": 0, "DIFFERENT": 0, "skipped": 0}
    with ThreadPoolExecutor(options.jobs) as pool:
        names = [name for name in PROGRAMS if not options.only or name in options.only]
        for verdict, said in pool.map(
            lambda name: compare(name, options.python, options.kill), names
        ):
            counts[verdict] += 1
            print("\n".join(said), flush=True)
    print(counts)


if __name__ == "__main__":
    main()
