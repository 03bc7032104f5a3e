"""Kills training programs at random, and says whether they end as if nobody had.

    python tools/resume_trials.py --kills 30 [--python VENV/bin/python] [--own FOLDER] [PROGRAM...]

Each program is a real one or has the form of one; it runs with two ranks under a real torchrun,
with the recipe that saferun ships for it. A random rank dies of SIGKILL at a random time, every
other time while a checkpoint is being written. Wanted is the undisturbed run's last line, with the
final loss and a hash of the weights. Kills as dense as these may look like a failure that comes
every time: a run that stops so is started again, as Slurm does when it queues a job again. Needs
what a program imports; exit status 1 where a line differs.

    python tools/resume_trials.py --odd [PROGRAM...]

Each program of two ranks is killed once, and then one rank sees other checkpoints than the other
(programs/resume/odd_rank.sh): none, or a cut one. The run has to end as an undisturbed one,
or with another status than 0. It needs root, for mounts of that rank alone.

FOLDER/nanoGPT is nanoGPT itself (train.py, model.py, configurator.py), which is run as it is: by
python, or with two ranks where no_cuda/sitecustomize.py lets it use CPUs. It draws its batches from
a random state that it does not save, so its data are as long as one batch and each draw is the
same. FOLDER/nanochat is nanochat itself (scripts and nanochat), whose loader resumes approximately,
so that all its documents are equal; it is not compiled (TORCHDYNAMO_DISABLE). Wanted is the last
loss, and every tensor of the checkpoints that are left, the optimizer's included.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]
import runs  # noqa: E402
from helpers import until  # noqa: E402

JOBS = ROOT / "tools" / "programs" / "resume"
SAVED = ("out", "base_checkpoints")  # where programs save
LOOK_S = 0.003  # between two looks for a checkpoint that is being written
LONGEST_S = 4.0  # from a start to a kill at a random time
LIMIT_S = 3000.0  # for a start or a run; generous, as an event ends the wait
WRITE_S = 0.03  # from the first sign of a checkpoint to a kill
STOPPED = "not tried again: the same failure after the same time"
SETTINGS = ("retry.attempts=200", "retry.attempts_total=500", "retry.backoff_s=[0, 0]")


class Program(NamedTuple):
    """What is run, and its recipe."""

    script: str  # a file, or a module
    args: tuple[str, ...]
    recipe: str  # a profile; "" for the settings
    settings: tuple[str, ...] = ()
    own: str = ""  # where the program itself is, below --own
    ranks: int = 2  # 1: python starts it, not torchrun
    last: str = r"(?:final loss|done step=).*"  # a line whose last one is compared


EXAMPLE = (*runs.SMALL[:1], "--width=192", "--heads=2", "--block=32", "--batch=2", "--log-every=10")
TRAINER = ("--save_steps=10", "--logging_steps=10", "--report_to=none", "--use_cpu", "--seed=5")
TINY = ("--block_size=32", "--batch_size=2", "--n_layer=2", "--n_head=2", "--n_embd=128")
NANOGPT = (
    *("--out_dir={place}/out", "--dataset={place}/data", "--wandb_log=False", "--compile=False"),
    *("--backend=gloo", "--device=cpu", "--dtype=float32", "--gradient_accumulation_steps=2"),
    *("--eval_interval=10", "--eval_iters=1", "--log_interval=10", "--max_iters=200"),
    *("--warmup_iters=10", "--lr_decay_iters=200", *TINY),
)
NANOCHAT = (
    *("--device-type=cpu", "--depth=2", "--aspect-ratio=32", "--head-dim=32", "--window-pattern=L"),
    *("--max-seq-len=32", "--device-batch-size=2", "--total-batch-size=64", "--run=dummy"),
    *("--num-iterations=40", "--save-every=5", "--eval-every=-1", "--core-metric-every=-1"),
    "--sample-every=-1",
)
TITAN = (
    *("--job.dump_folder={place}/out", "--model.name=small", "--model.flavor=small"),
    *("--training.dataset=rows", "--training.seq_len=32", "--training.local_batch_size=2"),
    *("--training.steps=60", "--parallelism.data_parallel_replicate_degree=2"),
    *("--parallelism.data_parallel_shard_degree=1", "--activation_checkpoint.mode=none"),
    *("--checkpoint.enable", "--checkpoint.interval=5", "--checkpoint.keep_latest_k=3"),
    *("--metrics.log_freq=1", "--debug.seed=5", "--lr_scheduler.warmup_steps=5"),
    "--training.mixed_precision_param=float32",
)
STEP = r"step \d+/\d+ \([\d.]+%\) \| loss: [\d.]+"
ITER = r"iter \d+: loss [\d.]+"
PROGRAMS = {
    "example": Program(
        str(runs.EXAMPLE),
        (*EXAMPLE, "--out={place}/out", "--steps=400", "--save-every=10", "--eval-every=1000"),
        "",
        ("retry.resume.checkpoints={--out}/checkpoint.pt", 'retry.resume.args=["--resume"]'),
    ),
    "nanogpt": Program("nanogpt_job.py", ("--out_dir={place}/out",), "resume-nanogpt"),
    "nanochat": Program("nanochat_job.py", ("--depth=4",), "resume-nanochat"),
    "hf": Program(
        "hf_job.py",
        ("--output_dir={place}/out", "--max_steps=400", "--learning_rate=0.01", *TRAINER),
        "resume-hf",
    ),
    "accelerate": Program("accelerate_job.py", ("--output_dir={place}/out",), "resume-accelerate"),
    "lightning": Program(
        "lightning_job.py",
        (
            *("fit", "--trainer.default_root_dir={place}/out", "--trainer.accelerator=cpu"),
            *("--trainer.devices=2", "--trainer.max_steps=400", "--seed_everything=5"),
            "--trainer.log_every_n_steps=10",
        ),
        "resume-lightning",
    ),
    "own": Program("own_resume_job.py", ("--out={place}/out",), ""),
    "own-sgd": Program("own_resume_job.py", ("--out={place}/out", "--sgd"), ""),
    "deepspeed": Program("deepspeed_job.py", ("--save={place}/out",), "resume-deepspeed"),
    "torchtitan": Program("torchtitan_cpu.py", TITAN, "resume-torchtitan"),
    "torchtitan-async": Program(
        "torchtitan_cpu.py", (*TITAN, "--checkpoint.async_mode=async"), "resume-torchtitan"
    ),
    "nanogpt-own": Program("train.py", NANOGPT, "resume-nanogpt", own="nanoGPT", last=ITER),
    "nanogpt-own-python": Program(
        "train.py", NANOGPT, "resume-nanogpt", ("launcher=python",), "nanoGPT", 1, ITER
    ),
    "nanochat-own-python": Program(
        "scripts.base_train", NANOCHAT, "resume-nanochat", ("launcher=python",), "nanochat", 1, STEP
    ),
}


class Tally(NamedTuple):
    """What came of one program's kills."""

    kills: int
    while_writing: int  # a file changed within the last moments
    passed_over: int  # checkpoints that were found incomplete
    fell_back: int  # that could not be loaded
    from_the_start: int  # attempts without a checkpoint
    queued_again: int
    runs: int
    differing: list[str]  # last lines


def main() -> int:
    """Try the programs; return 1 where one ended otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="*", help=f"of {', '.join(PROGRAMS)}; all of them")
    parser.add_argument("--kills", type=int, default=30, help="of each program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--python", default=sys.executable, help="that has torch and the libraries")
    parser.add_argument("--keep", default="", help="a directory for what was printed")
    parser.add_argument("--own", default="", help="a directory with the programs themselves")
    parser.add_argument("--odd", action="store_true", help="one rank sees other checkpoints")
    parser.add_argument("--longest-s", type=float, default=LONGEST_S, help="from a start to a kill")
    options = parser.parse_args()
    if options.odd:
        return odd(options)
    heads = "program, kills, while writing, passed over, fell back, from step 0, queued again"
    print("|", " | ".join((*heads.split(", "), "runs", "same")), "|")
    print("| --- " * 9 + "|", flush=True)
    failed = False
    for name in options.programs or PROGRAMS:
        one = PROGRAMS[name]
        file = one.script if one.script.endswith(".py") else f"{one.script.replace('.', '/')}.py"
        if one.own and not Path(options.own or os.devnull, one.own, file).is_file():
            print(f"    {name}: skipped: --own names no directory with {one.own}/{file}")
            continue
        with tempfile.TemporaryDirectory(prefix=f"resume-{name}-") as folder:
            tally = tried(name, options, Path(options.keep or folder))
        failed |= bool(tally.differing)
        same = f"{tally.runs - len(tally.differing)} of {tally.runs}"
        print("|", " | ".join(map(str, (name, *tally[:-1], same))), "|", flush=True)
        for line in tally.differing:
            print(f"    {name}: {line}")
    return int(failed)


def tried(name: str, options: argparse.Namespace, folder: Path) -> Tally:
    """Run a program undisturbed, and then as often as it takes to kill it so many times."""
    draw = random.Random(f"{options.seed} {name}")  # noqa: S311 - which moments, no secrets
    with started(name, options, folder / f"{name}-calm") as calm:
        status = calm.end(LIMIT_S)
    wanted = last_line(name, calm)
    if status or not wanted:
        return Tally(0, 0, 0, 0, 0, 0, 1, [f"undisturbed: status {status}, {wanted!r}"])
    done, text, count, again = list[bool](), "", 0, 0
    differing = []
    while len(done) < options.kills and not differing:
        place, queued = folder / f"{name}-{count}", 0
        while True:
            with started(name, options, place, queued) as job:
                done += killed(job, name, draw, options.kills - len(done), options.longest_s)
                status = job.end(LIMIT_S)
            if not status or STOPPED not in (place / "log").read_text(errors="replace"):
                break
            queued += 1
        text += (place / "log").read_text(errors="replace")
        count, again = count + 1, again + queued
        last = last_line(name, job)
        if status or last != wanted:
            differing.append(f"{place}: status {status}, {last!r}, not {wanted!r}")
    said = (" is skipped: ", " could not be loaded ", " starts as you wrote it: ")
    passed, back, fresh = map(text.count, said)
    return Tally(len(done), sum(done), passed, back, fresh, again, count, differing)


def odd(options: argparse.Namespace) -> int:
    """Have one rank see other checkpoints; return 1 where a run ends well with other weights."""
    failed = False
    print("| program | odd rank | sees | came to |")
    print("| --- " * 4 + "|", flush=True)
    for name in options.programs or [name for name, one in PROGRAMS.items() if not one.own]:
        with tempfile.TemporaryDirectory(prefix=f"odd-{name}-") as temporary:
            folder = Path(options.keep or temporary)
            with started(name, options, folder / f"{name}-calm") as calm:
                status = calm.end(LIMIT_S)
            wanted = last_line(name, calm)
            if status or not wanted:
                sys.exit(f"{name}: undisturbed: status {status}, {wanted!r}")
            for rank, sees in ((1, "hidden"), (1, "cut"), (0, "hidden")):
                place = folder / f"{name}-{rank}-{sees}"
                came = odd_end(name, options, place, (rank, sees), wanted)
                failed |= came.startswith("WRONG")
                print("|", " | ".join((name, str(rank), sees, came)), "|", flush=True)
    return int(failed)


def odd_end(
    name: str, options: argparse.Namespace, place: Path, view: tuple[int, str], wanted: str
) -> str:
    """Return what came of a run that was killed after its second save and has an odd rank."""
    env = {"PYTHON_EXEC": str(JOBS / "odd_rank.sh"), "ODD_PYTHON": options.python}
    env |= {"ODD_RANK": str(view[0]), "ODD": view[1], "ODD_PLACE": str(place)}
    with started(name, options, place, env=env) as job:
        saves, state = 0, written(place)
        while saves < 3 and job.process.poll() is None:
            time.sleep(0.2)
            now = written(place)
            saves, state = saves + (now[2] > state[2] + 200_000_000), now
        for pid in job.ranks().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        status = job.end(LIMIT_S)
    if status:
        return f"refused: {job.events('ended')[-1]['kind']}"
    return "the same" if last_line(name, job) == wanted else f"WRONG: not {wanted!r}"


@contextlib.contextmanager
def started(
    name: str,
    options: argparse.Namespace,
    place: Path,
    queued: int = 0,
    env: Mapping[str, str] | None = None,
) -> Iterator[runs.Run]:
    """Start a program under saferun; `queued` is how often Slurm has queued it again."""
    place.mkdir(parents=True, exist_ok=True)
    one = PROGRAMS[name]
    profile = place / "profile.yaml"
    extends = ", ".join(filter(None, ("cpu", one.recipe)))
    profile.write_text(f"schema: 1\nname: trial\nextends: [{extends}]\n")
    argv = [f"--profile={profile}", *(f"--set={s}" for s in (*SETTINGS, *one.settings))]
    where = Path(options.own, one.own).resolve() if one.own else JOBS
    argv += ["--standalone", "--nproc-per-node=2"] if one.ranks > 1 else []
    argv += [str(where / one.script)] if one.script.endswith(".py") else ["-m", one.script]
    argv += [word.format(place=place) for word in one.args]
    found = f"{os.path.dirname(options.python)}:{os.path.dirname(sys.executable)}"
    path = f"{found}:/usr/sbin:/usr/bin:/sbin:/bin"
    env = {**(env or {}), "PATH": path, "NANOCHAT_BASE_DIR": str(place)}
    env |= {"PYTHONPATH": str(ROOT / "src"), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    env |= {"TORCH_EXTENSIONS_DIR": str(place.parent / "extensions")}  # compiled once
    env |= {"SLURM_RESTART_COUNT": str(queued)} if queued else {}
    if one.own:
        env |= {"TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": f"{ROOT / 'src'}:{JOBS / 'no_cuda'}"}
        if one.own == "nanoGPT":
            one_batch(place / "data")
        elif not (place / "base_data").is_dir():
            nanochat_data(options.python, where, env)
    with (place / "log").open("ab") as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        job = runs.Run(place, argv, env=env, cwd=where if one.own else place, **output)
    try:
        yield job
    finally:
        job.close()


def one_batch(folder: Path) -> None:
    """Write token files for nanoGPT in which every batch is the same one."""
    folder.mkdir(exist_ok=True)
    for name in ("train.bin", "val.bin"):
        (folder / name).write_bytes(array("H", (n * n % 251 for n in range(33))).tobytes())
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def nanochat_data(python: str, folder: Path, env: dict[str, str]) -> None:
    """Write a tokenizer and shards for nanochat in which every batch is the same one."""
    command = [python, str(JOBS / "nanochat_data.py")]
    own = {**env, "PYTHONPATH": str(folder)}
    subprocess.run(command, env=own, stdout=subprocess.DEVNULL, check=True)


def last_line(name: str, job: runs.Run) -> str:
    """Return the last line with a final loss; of a program itself also what it saved last."""
    text = (job.folder / "log").read_text(errors="replace")
    one = PROGRAMS[name]
    found = re.findall(f"^{one.last}", text, re.MULTILINE)
    if not found:
        return ""
    return found[-1] + (tensors(job.folder) if one.own else "")


def tensors(folder: Path) -> str:
    """Return a hash of the tensors in the checkpoints below a folder."""
    content = hashlib.sha256()
    for path in sorted(p for name in SAVED for p in (folder / name).rglob("*.pt")):
        with zipfile.ZipFile(path) as file:
            for name in sorted(name for name in file.namelist() if "/data/" in name):
                content.update(name.encode() + file.read(name))
    return f" tensors {content.hexdigest()[:16]}"


def ranks_of(job: runs.Run, one: Program) -> dict[int, int]:
    """Return {rank: pid} of the processes that run the script."""
    if one.ranks > 1:
        return job.ranks()
    return dict(enumerate(set(job.processes(one.script)) - set(job.processes("--profile="))))


def killed(
    job: runs.Run, name: str, draw: random.Random, most: int, longest_s: float
) -> Iterator[bool]:
    """Kill ranks until the run ends; yield for each kill whether a checkpoint was being written."""
    number, before, one = 0, set[int](), PROGRAMS[name]
    while number < most:
        ranks: dict[int, int] = {}

        def up(ranks: dict[int, int] = ranks, before: set[int] = before) -> bool:
            ranks.clear()
            found = ranks_of(job, one)
            ranks.update({n: pid for n, pid in found.items() if pid not in before})
            return len(ranks) == one.ranks or job.process.poll() is not None

        until(up, "the ranks", LIMIT_S)
        aims = number % 2 == 1 or draw.random() < 0.3
        seen = waited(job, draw, aims, longest_s)
        if job.process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[draw.choice([0, 0, one.ranks - 1])], signal.SIGKILL)
            number += 1
            yield seen
        before = set(ranks.values())


def waited(job: runs.Run, draw: random.Random, aims: bool, longest_s: float) -> bool:
    """Wait until a kill is due; return whether a checkpoint is being written then."""
    place, after_s = job.folder, draw.uniform(0.0, longest_s)
    end = time.monotonic() + (LIMIT_S if aims else after_s)
    state = written(place)
    saves = draw.choice([1, 1, 2, 3])
    while time.monotonic() < end and job.process.poll() is None:
        time.sleep(LOOK_S)
        now = written(place)
        if now != state and aims:
            saves -= 1
            if not saves:
                time.sleep(draw.uniform(0.0, WRITE_S))
                return True
            time.sleep(0.2)  # this save ends
            now = written(place)
        state = now
    return False


def written(place: Path) -> tuple[int, int, int]:
    """Return how many files of checkpoints there are, their bytes and the last write."""
    count = size = last = 0
    for folder in SAVED:
        for above, _, names in os.walk(place / folder):
            for name in names:
                with contextlib.suppress(OSError):
                    facts = os.stat(os.path.join(above, name))
                    count, size = count + 1, size + facts.st_size
                    last = max(last, facts.st_mtime_ns)
    return count, size, last


if __name__ == "__main__":
    sys.exit(main())
