"""Kills training programs at random, and says whether they end as if nobody had.

    python tools/resume_trials.py --kills 30 [--python VENV/bin/python] [PROGRAM...]

Each program is a real one or has the form of one; it runs with two ranks under a real torchrun,
with the recipe that saferun ships for it. A random rank dies of SIGKILL at a random time, every
other time while a checkpoint is being written. Wanted is the undisturbed run's last line, with the
final loss and a hash of the weights. Kills as dense as these may look like a failure that comes
every time: a run that stops so is started again, as Slurm does when it queues a job again. Needs
what a program imports; exit status 1 where a line differs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]
import runs  # noqa: E402
from helpers import until  # noqa: E402

JOBS = ROOT / "tests" / "programs" / "resume"
LOOK_S = 0.003  # between two looks for a checkpoint that is being written
LONGEST_S = 4.0  # from a start to a kill at a random time
WRITE_S = 0.03  # from the first sign of a checkpoint to a kill
STOPPED = "not tried again: the same failure at the same age"
SETTINGS = ("retry.attempts=200", "retry.attempts_total=500", "retry.backoff_s=[0, 0]")


class Program(NamedTuple):
    """What is run, and its recipe."""

    script: str
    args: tuple[str, ...]
    recipe: str  # a profile; "" for the settings
    settings: tuple[str, ...] = ()


EXAMPLE = (*runs.SMALL[:1], "--width=192", "--heads=2", "--block=32", "--batch=2", "--log-every=10")
TRAINER = ("--save_steps=10", "--logging_steps=10", "--report_to=none", "--use_cpu", "--seed=5")
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
    "deepspeed": Program("deepspeed_job.py", ("--save={place}/out",), "resume-deepspeed"),
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
    options = parser.parse_args()
    heads = "program, kills, while writing, passed over, fell back, from step 0, queued again"
    print("|", " | ".join((*heads.split(", "), "runs", "same")), "|")
    print("| --- " * 9 + "|", flush=True)
    failed = False
    for name in options.programs or PROGRAMS:
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
        calm.end()
    wanted = last_line(calm)
    done, text, count, again = list[bool](), "", 0, 0
    differing = []
    while len(done) < options.kills and not differing:
        place, queued = folder / f"{name}-{count}", 0
        while True:
            with started(name, options, place, queued) as job:
                done += killed(job, place, draw, options.kills - len(done))
                status = job.end()
            if not status or STOPPED not in (place / "log").read_text(errors="replace"):
                break
            queued += 1
        text += (place / "log").read_text(errors="replace")
        count, again = count + 1, again + queued
        if status or last_line(job) != wanted:
            differing.append(f"{place}: status {status}, {last_line(job)!r}, not {wanted!r}")
    said = (" is passed over: ", " could not be loaded ", " starts as you wrote it: ")
    passed, back, fresh = map(text.count, said)
    return Tally(len(done), sum(done), passed, back, fresh, again, count, differing)


@contextlib.contextmanager
def started(
    name: str, options: argparse.Namespace, place: Path, queued: int = 0
) -> Iterator[runs.Run]:
    """Start a program under saferun; `queued` is how often Slurm has queued it again."""
    place.mkdir(parents=True, exist_ok=True)
    one = PROGRAMS[name]
    profile = place / "profile.yaml"
    extends = ", ".join(filter(None, ("cpu", one.recipe)))
    profile.write_text(f"schema: 1\nname: trial\nextends: [{extends}]\n")
    argv = [f"--profile={profile}", *(f"--set={s}" for s in (*SETTINGS, *one.settings))]
    argv += ["--standalone", "--nproc-per-node=2", str(JOBS / one.script)]
    argv += [word.format(place=place) for word in one.args]
    found = f"{os.path.dirname(options.python)}:{os.path.dirname(sys.executable)}"
    env = {"PATH": f"{found}:/usr/sbin:/usr/bin:/sbin:/bin", "NANOCHAT_BASE_DIR": str(place)}
    env |= {"PYTHONPATH": str(ROOT / "src"), "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    env |= {"SLURM_RESTART_COUNT": str(queued)} if queued else {}
    with (place / "log").open("ab") as log:
        job = runs.Run(place, argv, env=env, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield job
    finally:
        job.clean()


def last_line(job: runs.Run) -> str:
    """Return the last line with a final loss."""
    lines = (job.folder / "log").read_text(errors="replace").splitlines()
    found = [line for line in lines if line.startswith(("final loss", "done step="))]
    return found[-1] if found else ""


def killed(job: runs.Run, place: Path, draw: random.Random, most: int) -> Iterator[bool]:
    """Kill ranks until the run ends; yield for each kill whether a checkpoint was being written."""
    number, before = 0, set[int]()
    while number < most:
        ranks: dict[int, int] = {}

        def up(ranks: dict[int, int] = ranks, before: set[int] = before) -> bool:
            ranks.clear()
            ranks.update({n: pid for n, pid in job.ranks().items() if pid not in before})
            return len(ranks) == 2 or job.process.poll() is not None

        until(up, "two ranks", runs.LIMIT_S)
        aims = number % 2 == 1 or draw.random() < 0.3
        seen = waited(job, place, draw, aims)
        if job.process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[draw.choice([0, 0, 1])], signal.SIGKILL)
            number += 1
            yield seen
        before = set(ranks.values())


def waited(job: runs.Run, place: Path, draw: random.Random, aims: bool) -> bool:
    """Wait until a kill is due; return whether a checkpoint is being written then."""
    after_s = draw.uniform(0.0, LONGEST_S)
    end = time.monotonic() + (runs.LIMIT_S if aims else after_s)
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
    for folder in ("out", "base_checkpoints"):
        for above, _, names in os.walk(place / folder):
            for name in names:
                with contextlib.suppress(OSError):
                    facts = os.stat(os.path.join(above, name))
                    count, size = count + 1, size + facts.st_size
                    last = max(last, facts.st_mtime_ns)
    return count, size, last


if __name__ == "__main__":
    sys.exit(main())
