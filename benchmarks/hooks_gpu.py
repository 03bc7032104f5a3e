"""What the hooks cost in a training step, and what they show of planted faults, on two GPUs.

    python benchmarks/hooks_gpu.py --out FOLDER [--limit-s 520] [--only WAVE] [--steps N]
                                   [--ranks 2] [--smoke]

Each row is a training of a small GPT on two ranks, wrapped and compiled in one way, under plain
torchrun and under saferun with some settings. Plain torchrun's jobs are warmed up
first, which leaves their kernels, compiled and tuned, to the others; then all of a row take turns
of some steps, nine rounds, so that a round is a pair: the median step of a side is divided by that
of torchrun in the same round. A second torchrun shows what two equal jobs differ
by on that machine. Before that faults are planted (hooks_shown.py),
and ordinary programs with real trainers follow (shards.py). FOLDER gets hooks.json and hooks.md
after each row, with the end of the output of jobs that failed. --smoke: tiny sizes, gloo, two rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hooks_shown

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = Path(__file__).with_name("train_in_turns.py")
PLAIN, AGAIN = "torchrun", "torchrun again"
ROUNDS = 9
STEPS = {"ddp": 25, "fsdp2": 60}  # of a turn; FSDP2's vary more from one to the next
WARM_S, TURN_S = 240.0, 60.0  # longest
GUARDS = ["hooks.guards.labels=on", "hooks.guards.embeddings=on", "hooks.guards.logits=on"]
SIDES = {
    PLAIN: None,
    AGAIN: None,
    "default": [],
    "no hooks": [
        *("hooks.excepthook=off", "hooks.order.mode=off", "hooks.order.wrap_barrier=false"),
        *("hooks.init.barrier=off", "hooks.init.agree=off", "hooks.init.set_device=false"),
        "hooks.shards=off",
    ],
    "guards": GUARDS,
    "autotune off": ["hooks.compile.autotune=off"],
    "graphs and markers off": ["hooks.compile.cudagraphs=off", "hooks.cudagraph_markers=off"],
    "all": [*GUARDS, "hooks.order.mode=fix"],
}
BOTH = (PLAIN, AGAIN, "default")
WAVES: dict[str, dict[str, tuple[str, ...]]] = {  # jobs that are there at the same time
    "ddp": {
        "ddp eager": (*BOTH, "no hooks", "guards"),
        "ddp default": (*BOTH, "guards, compiled too"),
    },
    "fsdp2": {
        "fsdp2 eager": BOTH,
        "fsdp2 default": BOTH,
        "ddp deterministic": (PLAIN, "all"),
    },
    "graphs": {
        "ddp reduce-overhead": (*BOTH, "graphs and markers off", "guards, compiled too"),
        "fsdp2 reduce-overhead": BOTH,
    },
    "max-autotune": {
        "ddp max-autotune": (*BOTH, "autotune off"),
        "fsdp2 max-autotune": BOTH,
    },
}
HOST = {"host": {"ddp eager": BOTH, "ddp default": BOTH}}  # whole_host.py's: little, on many GPUs
SMOKE = {"smoke": {"ddp deterministic": (PLAIN, "all"), "fsdp2 eager": BOTH}}


class Job:
    """One training: its process, and a connection to each of its ranks."""

    def __init__(self, row: str, side: str, folder: Path, port: int, count: int) -> None:
        self.name, self.side, self.count = f"{row} / {side}", side, count
        self.folder = folder / self.name.replace(" / ", "--").replace(" ", "_").replace(",", "")
        self.folder.mkdir(parents=True)
        self.ranks: dict[int, Any] = {}  # files of the connections
        self.hello: dict[str, Any] = {}
        wrap, mode = row.split()
        path = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environ = {
            **os.environ,
            **{"WRAP": wrap, "MODE": mode, "NAME": self.name, "TURNS": f"127.0.0.1:{port}"},
            **{"PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"},
            **{"TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS": "ATEN"},  # all of them take minutes
            **{"TORCHINDUCTOR_COMPILE_THREADS": "4"},  # of each rank, of twenty at a time
            **{"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},  # for what is deterministic
            **{"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "HOME": str(self.folder)},
        }
        with open(self.folder / "out", "w") as out, open(self.folder / "err", "w") as err:
            self.process = subprocess.Popen(
                self._command(), env=environ, stdout=out, stderr=err, start_new_session=True
            )

    def _command(self) -> list[str]:
        settings = SIDES[self.side]
        start = [sys.executable, "-m"]
        if settings is None:
            start += ["torch.distributed.run"]
        else:
            start += ["saferun", "--run-dir", str(self.folder / "runs"), "--set", "locks.gpus=off"]
            start += [word for one in settings for word in ("--set", one)]
        return [*start, "--standalone", f"--nproc-per-node={self.count}", str(PROGRAM)]

    def turn(self, steps: int) -> float | None:
        """Have all ranks do some steps; return rank 0's ms for each, None where the job failed."""
        try:
            for file in self.ranks.values():
                file.write(f"{steps}\n")
                file.flush()
            answers = {rank: json.loads(file.readline()) for rank, file in self.ranks.items()}
        except (OSError, ValueError):
            self.ranks = {}
            return None
        self.hello["loss"] = answers[0]["loss"]
        return float(answers[0]["ms"])

    def release(self) -> None:
        """Let the ranks end."""
        for file in self.ranks.values():
            with contextlib.suppress(OSError):
                file.write("0\n")
                file.flush()

    def end(self) -> None:
        """Wait for their end, and end what does not."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None and self.process.poll() is None:
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
                return

    def facts(self) -> dict[str, Any]:
        """What came of it beside its times."""
        messages = [
            line
            for line in (self.folder / "err").read_text(errors="replace").splitlines()
            if line.startswith("saferun:")
        ]
        found = {"status": self.process.poll(), "messages": messages, **self.hello}
        return found | {"hooks": hooks_shown.applied(self.folder / "runs")}


class Row(NamedTuple):
    """Jobs that take turns."""

    name: str
    jobs: list[Job]


def warm(rows: list[Row], listener: socket.socket, until: float) -> None:
    """Wait until all ranks of all jobs are connected, have failed, or are too late."""
    jobs = {job.name: job for row in rows for job in row.jobs}
    while time.monotonic() < until:
        missing = [j for j in jobs.values() if len(j.ranks) < j.count and j.process.poll() is None]
        if not missing:
            return
        if select.select([listener], [], [], 1.0)[0]:
            connection = listener.accept()[0]
            connection.settimeout(TURN_S)
            file = connection.makefile("rw")
            hello = json.loads(file.readline())
            job = jobs[hello["name"]]
            job.ranks[hello["rank"]] = file
            if hello["rank"] == 0:
                job.hello = {"losses": hello["losses"]}


def take_turns(row: Row, rounds: int, steps: int, until: float) -> dict[str, list[float]]:
    """Return the ms of a step by side, one number a round; a side that failed has fewer."""
    ready = [job for job in row.jobs if len(job.ranks) == job.count]
    taken: dict[str, list[float]] = {job.side: [] for job in ready}
    for number in range(rounds):
        start = number % len(ready) if ready else 0
        order = [*ready[start:], *ready[:start]]
        for job in order if number % 2 else order[::-1]:
            found = job.turn(steps) if job.ranks else None
            if found is not None:
                taken[job.side].append(found)
        if time.monotonic() > until:
            break
    return taken


def result(row: Row, taken: dict[str, list[float]]) -> dict[str, Any]:
    """Return all that is known of a row."""
    sides = {}
    plain = taken.get(PLAIN, [])
    for job in row.jobs:
        ms = taken.get(job.side, [])
        ratios = [a / b for a, b in zip(ms, plain)]  # noqa: B905 - a side that failed has fewer
        sides[job.side] = {"ms": ms, "ratios": ratios, **job.facts()}
    first = _losses(sides[PLAIN])
    for found in sides.values():
        found["same losses"] = len(first) > 1 and _losses(found) == first
    return {"row": row.name, "sides": sides}


def _losses(found: dict[str, Any]) -> list[float]:
    """Return the first losses of a side, and the last one."""
    return [*found.get("losses", []), found.get("loss", 0.0)]


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a table of all rows."""
    yield "| training | side | ms/step | losses | ratio to torchrun: median | least | most | of |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in results:
        for side, found in row["sides"].items():
            ms, ratios = found["ms"], found["ratios"]
            cells = [row["row"], side]
            if not ms:
                cells += [f"failed: {found['status']}", "", "", "", "", ""]
            else:
                middle = f"{statistics.median(ratios):.4f}" if ratios else ""
                ends = [f"{one(ratios):.4f}" if ratios else "" for one in (min, max)]
                losses = "the same" if found["same losses"] else "others"
                cells += [f"{statistics.median(ms):.2f}", losses, middle, *ends, str(len(ratios))]
            yield f"| {' | '.join(cells)} |"


class Results:
    """Everything so far, on the disk after each part."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.rows: list[dict[str, Any]] = []
        self.shown: list[dict[str, Any]] = []
        self.texts: dict[str, str] = {}  # name of a part -> Markdown of its own

    def write(self) -> None:
        """Write both files."""
        facts = {"machine": hooks_shown.machine(), "rows": self.rows, "shown": self.shown}
        (self.folder / "hooks.json").write_text(json.dumps({**facts, **self.texts}, indent=1))
        lines = [hooks_shown.machine(), "", *table(self.rows), "", *hooks_shown.table(self.shown)]
        for name, text in self.texts.items():
            lines += ["", f"{name}:", "", text]
        (self.folder / "hooks.md").write_text("\n".join(lines) + "\n")


def wave(
    part: str, report: Results, work: Path, until: float, steps: int | None, count: int
) -> None:
    """Start the jobs of some rows, have them take turns row by row, and report.

    Args:
        part: a key of WAVES or SMOKE.
        report: gets each row.
        work: an empty folder.
        until: time.monotonic() when the last round begins.
        steps: of a turn; None for those of STEPS.
        count: ranks.
    """
    rows = {**WAVES, **HOST, **SMOKE}[part]
    rounds = 2 if part in SMOKE else ROUNDS
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        all_rows = [Row(name, []) for name in rows]
        try:
            for first in (True, False):
                for row in all_rows:
                    sides = [side for side in rows[row.name] if (side == PLAIN) is first]
                    row.jobs.extend(Job(row.name, side, work, port, count) for side in sides)
                warm(all_rows, listener, until if part in SMOKE else time.monotonic() + WARM_S)
            for row in all_rows:
                taken = take_turns(row, rounds, steps or STEPS[row.name.split()[0]], until)
                report.rows.append(result(row, taken))
                report.write()
        finally:
            jobs = [job for row in all_rows for job in row.jobs]
            for job in jobs:
                job.release()
            for job in jobs:
                job.end()
    for job in jobs:
        if job.process.returncode:
            text = (job.folder / "err").read_text(errors="replace")
            report.texts[f"end of {job.name}"] = "```\n" + text[-3000:] + "\n```"
    report.write()


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=520.0, help="for all of it")
    parser.add_argument(
        "--only", action="append", choices=["shown", *WAVES, *HOST, *SMOKE, "shards"]
    )
    parser.add_argument("--steps", type=int, help="of each turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + options.limit_s
    if options.smoke:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        options.steps = options.steps or 2
    parts = options.only or ["shown", *(SMOKE if options.smoke else WAVES), "shards"]
    parts.sort(key=lambda part: part == "max-autotune")  # last, since it compiles for minutes
    report = Results(options.out)
    with tempfile.TemporaryDirectory() as work:
        for part in parts:
            if time.monotonic() > until - 20:
                report.texts[part] = "not run: the time was over"
                continue
            print(f"{part}: {until - time.monotonic():.0f} s left", flush=True)
            folder = Path(work) / part.replace(" ", "_")
            folder.mkdir()
            if part == "shown":
                for found in hooks_shown.show(folder, until, smoke=options.smoke):
                    report.shown.append(found)
                    report.write()
            elif part == "shards":
                report.texts[part] = hooks_shown.shards(until, folder / "shards.md")
            else:
                wave(part, report, folder, until, options.steps, options.ranks)
            report.write()
    print((options.out / "hooks.md").read_text())


if __name__ == "__main__":
    main()
