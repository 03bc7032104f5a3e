"""What only several GPUs of one host can show, in one call of nine minutes.

    python benchmarks/whole_host.py --out FOLDER [--limit-s 530] [--ranks N] [--only PART ...]

Parts, in this order; N ranks are all GPUs of the host, two of gloo where there are none:

    starts    start.py with NCCL: torchrun, saferun, saferun with warm ranks, first and second sight
    step      hooks_gpu.py with all ranks: the ratio of steps, torchrun and saferun in turns
    goodput   goodput.py: eight faults in four minutes; needs root. Beside it, on the same cards:
    faults    a rank is killed, stopped, spins, sleeps, is slow by a fifth of a step, another one
              each: seconds until it is named, until the next attempt begins, until the job is
              further than it was
    hidden    one rank sees no GPU
    locks     two runs on halves of the cards, then a third on cards that both have
    health    preflight.py, saferun doctor --full

FOLDER gets what each part prints, as soon as it has ended: NAME.txt.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
JOB = HERE / "whole_host_job.py"
SAFERUN = [sys.executable, "-m", "saferun", "--set=locks.gpus=off"]
KINDS = "segfault,kill-1,hang-1,cut,kill-0,stopped,agent-killed,autotune"
FURTHER = 3  # steps beyond the last one, after which a job goes on
QUIET_S, LIMIT_S = 15.0, 70.0  # of watch.silence_s; of one fault
SLOW_LIMIT_S = 300.0  # a slow rank is named from the fourth minute on


class Host(NamedTuple):
    """The cards, and where results go."""

    ranks: int
    cuda: bool
    out: Path
    until: float  # time.monotonic() of the end

    def left_s(self) -> float:
        return max(1.0, self.until - time.monotonic())


class Run:
    """The job under saferun; its messages with their times."""

    def __init__(self, folder: Path, host: Host, *settings: str, gpus: str = "") -> None:
        (folder / "pids").mkdir(parents=True)
        self.place = folder
        self.said: list[tuple[float, str]] = []
        words = [*SAFERUN, *(f"--set={one}" for one in settings), "--standalone"]
        words += [
            f"--nproc-per-node={len(gpus.split(',')) if gpus else host.ranks}",
            str(JOB),
            str(folder),
        ]
        environ = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
        environ |= {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        environ["PYTHONPATH"] = f"{HERE.parent / 'src'}:{os.environ.get('PYTHONPATH', '')}"
        self.process = subprocess.Popen(
            words,
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr
        self.said.extend((time.time(), line.rstrip()) for line in self.process.stderr)

    def steps(self) -> list[tuple[float, int]]:
        path = self.place / "steps"
        lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(float(at), int(step)) for at, step in lines]

    def wait(self, condition: Callable[[], object], limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while not (found := bool(condition())) and time.monotonic() < until:
            if self.process.poll() is not None:
                return bool(condition())
            time.sleep(0.05)  # between two looks
        return found

    def first(self, pattern: str, after: float) -> float | None:
        """Return the seconds from `after` until saferun said this; None if it did not."""
        found = (at for at, line in self.said if at >= after and re.search(pattern, line))
        return next((at - after for at in found), None)

    def end(self) -> int:
        (self.place / "stop").touch()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number and self.process.poll() is None:
                self.process.send_signal(number)
            try:
                self.process.wait(20)
                break
            except subprocess.TimeoutExpired:
                continue
        self._reader.join()
        return self.process.wait()

    def text(self) -> str:
        return "\n".join(line for _, line in self.said)


def faults(host: Host, folder: Path) -> Iterator[str]:
    """Strike a rank in one way after the other, each time another rank."""
    yield "| fault | rank | named | next attempt | further than before | status | said |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    ways = ("kill", "stop", "spin", "sleep", "slow")
    with ThreadPoolExecutor(len(ways)) as pool:  # their steps wait: the cards have room for all
        tasks = [
            pool.submit(struck, host, folder / what, what, (n + 1) % host.ranks)
            for n, what in enumerate(ways)
        ]
        for task in tasks:
            yield task.result()


def struck(host: Host, folder: Path, what: str, rank: int) -> str:
    """Strike one job once; return a row of the table."""
    settings = ["watch.mode=end", f"watch.silence_s={QUIET_S:g}"]
    if what == "slow":
        settings += [f"env.{name}=2000" for name in ("TORCH_FR_BUFFER_SIZE",)]
    run = Run(folder, host, *settings)
    run.wait(lambda: len(run.steps()) > 30, LIMIT_S)
    began, before = time.time(), max((step for _, step in run.steps()), default=0)
    if what in ("kill", "stop"):
        pid = int((folder / "pids" / str(rank)).read_text())
        os.kill(pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
    else:
        (folder / f"fault-{rank}").write_text(what)

    def further() -> list[float]:
        return [at - began for at, step in run.steps() if step > before + FURTHER and at > began]

    pattern = rf"rank {rank}\b"
    if what == "slow":
        run.wait(lambda: run.first(pattern, began), min(SLOW_LIMIT_S, host.left_s()))
        resumed = None
    else:
        run.wait(lambda: run.first("attempt 2", began) and further(), LIMIT_S)
        resumed = next(iter(further()), None)
    status = run.end()
    (folder / "said.txt").write_text(run.text())
    named, again = run.first(pattern, began), run.first("attempt 2", began)
    said = next((line for at, line in run.said if at >= began and re.search(pattern, line)), "")
    seconds = ["-" if s is None else f"{s:.1f} s" for s in (named, again, resumed)]
    return (
        "| " + " | ".join([what, str(rank), *seconds, str(status), said.replace("|", "/")]) + " |"
    )


def hidden(host: Host, folder: Path) -> Iterator[str]:
    """Hide the GPUs from the last rank: an image or a wrapper that goes wrong does so."""
    wrapper = 'test "$LOCAL_RANK" != "$1" || export CUDA_VISIBLE_DEVICES=; shift; exec "$@"'
    (folder / "pids").mkdir(parents=True)
    (folder / "stop").touch()  # where no rank fails, they end after a step
    command = [*SAFERUN, "--standalone", f"--nproc-per-node={host.ranks}", "--no-python"]
    command += ["bash", "-c", wrapper, "-", str(host.ranks - 1), sys.executable, str(JOB)]
    yield from lines_of([*command, str(folder)], host)


def locks(host: Host, folder: Path) -> Iterator[str]:
    """Run on both halves at once, then where another run is."""
    half = max(1, host.ranks // 2)
    cards = [",".join(map(str, range(0, half))), ",".join(map(str, range(half, host.ranks)))]
    runs = []
    for number, part in enumerate(cards):
        runs.append(Run(folder / str(number), host, "locks.gpus=refuse", gpus=part))
    for run, part in zip(runs, cards, strict=True):
        yield f"GPUs {part}: {'trains' if run.wait(run.steps, LIMIT_S) else 'no step'}"
    third = Run(folder / "third", host, "locks.gpus=refuse", gpus=cards[0])
    third.wait(third.steps, 20)
    yield f"a third on GPUs {cards[0]}: status {third.end()}"
    yield third.text()
    for run in runs:
        yield f"status {run.end()}"


def lines_of(command: list[str], host: Host) -> Iterator[str]:
    """Run a command, which has the time that is left; yield what it wrote."""
    yield "$ " + " ".join(command)
    limit = ["timeout", f"{host.left_s():.0f}"]
    done = subprocess.run([*limit, *command], stdout=-1, stderr=-2, text=True, errors="replace")
    yield f"{done.stdout}\nstatus {done.returncode}"


def script(name: str, *argv: str) -> list[str]:
    return [sys.executable, str(HERE / name), *argv]


def starts(host: Host, folder: Path) -> Iterator[str]:
    ways = ("--ways", "torchrun", "saferun", "saferun warm")
    yield from lines_of(
        script("start.py", "--rounds=2", "--ranks", str(host.ranks), "--nccl", *ways), host
    )


def step(host: Host, folder: Path) -> Iterator[str]:
    argv = [f"--out={folder}", f"--ranks={host.ranks}", f"--limit-s={min(120, host.left_s()):.0f}"]
    argv += ["--only=host"] if host.cuda else ["--only=smoke", "--smoke"]
    yield from lines_of(script("hooks_gpu.py", *argv), host)


def goodput(host: Host, folder: Path) -> Iterator[str]:
    seconds = min(240, host.left_s() - 60)
    argv = [f"--seconds={seconds:.0f}", f"--kinds={KINDS}", f"--ranks={host.ranks}"]
    yield from lines_of(script("goodput.py", *argv, "--only=undisturbed,saferun"), host)


def health(host: Host, folder: Path) -> Iterator[str]:
    if host.cuda:
        yield from lines_of(script("preflight.py", "--runs=3", "--pairs=3", "--nproc=gpu"), host)
    yield from lines_of([sys.executable, "-m", "saferun", "doctor", "--full"], host)


PARTS = {f.__name__: f for f in (starts, step, goodput, faults, hidden, locks, health)}
BESIDE = ("faults", "hidden")  # beside `goodput`


def part(name: str, host: Host, work: Path) -> None:
    """Run one part, and write what it says."""
    began = time.monotonic()
    with (host.out / f"{name}.txt").open("w") as file:
        for text in PARTS[name](host, work / name):
            print(text, file=file, flush=True)
            print(f"[{name}] {text}", flush=True)
        print(f"[{name}] took {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=530.0, help="for all of it")
    parser.add_argument("--ranks", type=int, default=0, help="default: one for each GPU")
    parser.add_argument("--only", action="append", choices=PARTS)
    options = parser.parse_args()
    asked = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    gpus = int(subprocess.check_output(asked, text=True))
    options.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + options.limit_s
    host = Host(options.ranks or gpus or 2, gpus > 0, options.out, until)
    chosen = options.only or list(PARTS)
    with tempfile.TemporaryDirectory() as work, ThreadPoolExecutor(len(PARTS)) as pool:
        for name in (name for name in PARTS if name in chosen):
            if name in BESIDE and "goodput" in chosen:
                continue
            others = [one for one in BESIDE if one in chosen] if name == "goodput" else []
            beside = [pool.submit(part, one, host, Path(work)) for one in others]
            part(name, host, Path(work))
            for task in beside:
                task.result()


if __name__ == "__main__":
    main()
