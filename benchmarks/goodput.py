"""Goodput: the training that is left when twenty faults strike in ten minutes.

    python benchmarks/goodput.py [--seconds 600] [--ft DIR] [--only NAME,...] [--kinds KIND,...]
                                 [--ranks 2]

The example trains (goodput_job.py) under several launchers side by side, each struck by the same
trace; one more, under torchrun, is left undisturbed. Counted is the step of the last checkpoint at
the end, as a share of the undisturbed run's. Each launcher has the resume and the end of a hang
that it can have:

    saferun       retry.resume, watch.mode=end; else its defaults
    saferun warm  the same with start.ranks=warm
    torchrun      nothing; the script would go on from its newest whole checkpoint
    torchrun 10   --max-restarts=10 with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which its
                  restarts hang, c10d rendezvous, and a timeout of collectives
    ft_launcher   --max-restarts=10, heartbeats in the script; `--ft` is the environment of
                  nvidia-resiliency-ext

A step takes 0.2 s, most of it slept, and the launchers are struck some seconds apart, so that they
do not compete for the CPU. When a launcher ends, its job is over, and what is left of it is killed,
as a scheduler does it. A preempted job (SIGTERM to its launcher) is started again after 2 s with
SLURM_RESTART_COUNT. The last fault is a mistake in the script, which no restart cures: it ends the
count. Needs root, for a file system that can be full.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "benchmarks" / "goodput_job.py"
MARK = "GOODPUT_MARK"
SMALL = ["--layers=1", "--width=64", "--heads=2", "--block=32", "--batch=2", "--steps=1000000"]
RHYTHM = ["--eval-every=1000000", "--log-every=5", "--save-every=5"]
PATIENCE_S = 3.0  # with a hang: 15 steps
HELD_S = 4.0  # a full disk, a taken port, memory of another process
REQUEUED_S = 2.0  # after a preemption
GRACE_S = 30.0  # from SIGTERM to SIGKILL
APART_S = 7.0  # between two launchers
AFTER_S = 20.0  # the end: whether the mistake is tried again
DISK = "16m"
BOUND = 0.85
# When, in seconds of the run, what strikes. "mistake" comes at the end.
TRACE = (
    (25, "segfault"),
    (52, "kill-1"),
    (83, "disk-full"),
    (108, "hang-1"),
    (139, "cut"),
    (166, "memory"),
    (193, "kill-0"),
    (224, "preempted"),
    (251, "port-taken"),
    (276, "segfault"),
    (307, "stopped"),
    (336, "agent-killed"),
    (361, "disk-full"),
    (388, "kill-1"),
    (419, "preempted"),
    (446, "autotune"),
    (473, "cut"),
    (501, "segfault"),
    (530, "agent-killed"),
)


class Contender(NamedTuple):
    """A launcher with its options."""

    name: str
    command: tuple[str, ...]  # {port} is the job's own
    script_args: tuple[str, ...]
    environ: dict[str, str]
    trace: tuple[tuple[float, str], ...]


class Result(NamedTuple):
    """What came of one."""

    name: str
    saved: int  # the step of the last checkpoint at the end
    starts: int
    ended_s: float | None  # when the launcher gave up; None if it lived to the end
    status: int | None
    tried_again: int  # starts after the mistake
    costs: list[tuple[str, float]]  # seconds without progress after each fault


# --- one job under one launcher ------------------------------------------------------------------


class Job:
    """A launcher with its job, and what strikes it."""

    def __init__(self, contender: Contender, place: Path, port: int) -> None:
        self.contender, self.place, self.port = contender, place, port
        self.mark = uuid.uuid4().hex
        self.is_over = False
        self.is_preempted = False
        self.ended_s: float | None = None
        self.requeued = 0
        (place / "pids").mkdir(parents=True)
        (place / "out").mkdir()
        size = ["-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place / "out")]
        subprocess.run(["mount", *size], check=True)
        self.log = (place / "log").open("ab")
        self.began = time.time()
        self.start()

    def start(self) -> None:
        one = self.contender
        words = [word.format(port=self.port) for word in one.command]
        script = [str(JOB), f"--place={self.place}", *one.script_args, *SMALL, *RHYTHM]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "SAFERUN_"))}
        environ |= {"OMP_NUM_THREADS": "1", "HOME": str(self.place), MARK: self.mark, **one.environ}
        if self.requeued:
            environ["SLURM_RESTART_COUNT"] = str(self.requeued)
        self.process = subprocess.Popen(
            [*words, *script],
            env=environ,
            cwd=self.place,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )

    def note_end(self) -> None:
        """See whether the launcher has given up; then the job is over."""
        if not (self.is_over or self.is_preempted) and self.process.poll() is not None:
            self.is_over, self.ended_s = True, time.time() - self.began
            self.kill_left()

    def rank(self, number: int) -> tuple[int, int] | None:
        """Return the pid of a rank that lives, and its agent's."""
        with contextlib.suppress(OSError, ValueError):
            pid, parent = map(int, (self.place / "pids" / str(number)).read_text().split())
            # Not by its mark: a forked rank has the environment of its agent's start there.
            if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == parent:
                return pid, parent
        return None

    def kill_left(self) -> None:
        """End all that is left of the job."""
        mark = f"{MARK}={self.mark}".encode()
        for number in map(int, filter(str.isdigit, os.listdir(self.place / "pids"))):
            if found := self.rank(number):
                os.kill(found[0], signal.SIGKILL)
        for _ in range(100):
            found = 0
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    if mark in Path(f"/proc/{name}/environ").read_bytes():
                        found += 1
                        os.kill(int(name), signal.SIGKILL)
            if not found:
                return
            time.sleep(0.05)  # for the kernel to end them

    def close(self) -> None:
        self.process.poll()
        self.kill_left()
        self.process.wait()
        self.log.close()
        subprocess.run(["umount", "-l", str(self.place / "out")], check=False)

    # --- faults ---

    def strike(self, what: str) -> None:
        """Strike once."""
        kill = {"segfault": (1, signal.SIGSEGV), "kill-0": (0, signal.SIGKILL)}
        kill |= {"kill-1": (1, signal.SIGKILL), "stopped": (1, signal.SIGSTOP)}
        if what in kill:
            self.signal_rank(*kill[what])
        elif what in ("hang-1", "cut", "autotune", "mistake"):
            (self.place / what).touch()
        else:
            {
                "agent-killed": self.kill_agent,
                "disk-full": self.fill_disk,
                "memory": self.take_memory,
                "port-taken": self.take_port,
                "preempted": self.preempt,
            }[what]()

    def signal_rank(self, number: int, sent: signal.Signals) -> None:
        if found := self.rank(number):
            os.kill(found[0], sent)

    def kill_agent(self) -> None:
        if found := self.rank(0):
            os.kill(found[1], signal.SIGKILL)

    def fill_disk(self) -> None:
        ballast = self.place / "out" / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(HELD_S)  # the fault's own length: the disk is full so long
        ballast.unlink()

    def take_memory(self) -> None:
        (self.place / "memory").touch()
        time.sleep(HELD_S)  # the fault's own length: the memory is taken so long
        (self.place / "memory").unlink()

    def take_port(self) -> None:
        """Crash a rank, and take the job's port as soon as it is free."""
        self.signal_rank(0, signal.SIGKILL)
        until = time.monotonic() + HELD_S
        while time.monotonic() < until:
            with socket.socket(socket.AF_INET6) as taken, contextlib.suppress(OSError):
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                taken.bind(("::", self.port))
                taken.listen()
                time.sleep(max(0.0, until - time.monotonic()))  # the port is taken so long
            time.sleep(0.001)  # it is the job's still

    def preempt(self) -> None:
        self.is_preempted = True
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_S)
        self.kill_left()
        self.process.wait()
        time.sleep(REQUEUED_S)  # what a scheduler takes to start it again
        self.requeued += 1
        self.start()
        self.is_preempted = False


def go(contender: Contender, seconds: float, place: Path, port: int) -> Result:
    """Run one contender for its time."""
    job = Job(contender, place, port)
    try:
        for at, what in contender.trace:
            wait_until(job, at)
            if not job.is_over:
                job.strike(what)
        wait_until(job, seconds)
        notes = steps(place)
        if contender.trace:
            job.strike("mistake")
            wait_until(job, seconds + AFTER_S)
        saved = [step for at, what, step in notes if what == "saved"]
        before = sum(what == "start" for _, what, _ in notes)
        after = starts_in_all(place) - before
        costs = lost_after(notes, contender.trace, job.began)
        status = job.process.poll()
        return Result(
            contender.name, max(saved, default=0), before, job.ended_s, status, after, costs
        )
    finally:
        job.close()


def wait_until(job: Job, at_s: float) -> None:
    while (left := job.began + at_s - time.time()) > 0:
        job.note_end()
        time.sleep(min(0.1, left))  # between two looks whether the launcher lives
    job.note_end()


def steps(place: Path) -> list[tuple[float, str, int]]:
    """Return what rank 0 has noted: when, `start`, `step` or `saved`, and the step."""
    with contextlib.suppress(FileNotFoundError):
        lines = [line.split() for line in (place / "steps").read_text().splitlines()]
        return [(float(at), what, int(step)) for at, what, step in lines]
    return []


def starts_in_all(place: Path) -> int:
    return sum(what == "start" for _, what, _ in steps(place))


def lost_after(
    notes: list[tuple[float, str, int]], trace: tuple[tuple[float, str], ...], began: float
) -> list[tuple[str, float]]:
    """Return for each fault the time from it until the job is further than it was before."""
    costs = []
    for at, what in trace:
        best = max(
            (step for t, kind, step in notes if kind == "step" and t <= began + at), default=0
        )
        beyond = (t for t, kind, step in notes if kind == "step" and step > best + 10)
        costs.append((what, next(beyond, float("inf")) - began - at - 2.0))
    return costs


# --- all of them ---------------------------------------------------------------------------------


def contenders(options: argparse.Namespace) -> list[Contender]:
    own = str(Path(sys.executable).parent)
    path = {"PATH": f"{own}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    ranks = f"--nproc-per-node={options.ranks}"
    torchrun = (f"{own}/torchrun", ranks, "--master-port={port}")
    places = "retry.resume.checkpoints={{--place}}/out/checkpoint-*.pt"
    settings = [places, 'retry.resume.args=["--resume={{checkpoint}}"]', "watch.mode=end"]
    settings += [f"watch.silence_s={PATIENCE_S:g}"]
    saferun = (
        sys.executable,
        "-m",
        "saferun",
        "--profile=cpu",
        "--set=locks.gpus=off",
        *(f"--set={s}" for s in settings),
    )
    warm = "--set=start.ranks=warm"
    auto, none = ("--resume=auto",), ("--resume=none",)
    trace = chosen_trace(options)
    restarts = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **path}
    again = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=10")
    limit = f"--timeout-s={PATIENCE_S:g}"
    found = [
        Contender("undisturbed", torchrun, none, path, ()),
        Contender("saferun", (*saferun, *torchrun[1:]), none, path, trace),
        Contender("saferun warm", (*saferun, warm, *torchrun[1:]), none, path, trace),
        Contender("torchrun", torchrun, auto, path, trace),
        Contender("torchrun 10", (*torchrun[:2], *again), (*auto, limit), restarts, trace),
    ]
    if options.ft:
        heart = ["initial-rank-heartbeat-timeout=60", f"rank-heartbeat-timeout={PATIENCE_S:g}"]
        heart += ["workload-check-interval=1", "enable-nic-monitor=false"]
        words = [
            f"{options.ft}/bin/ft_launcher",
            *(f"--ft-{word}" for word in heart),
            *torchrun[1:],
        ]
        ft_path = {**restarts, "PATH": f"{options.ft}/bin:{os.environ['PATH']}"}
        found.append(Contender("ft_launcher", (*words, *again), auto, ft_path, trace))
    return [one for one in found if not options.only or one.name in options.only.split(",")]


def chosen_trace(options: argparse.Namespace) -> tuple[tuple[float, str], ...]:
    if options.kinds:
        kinds = [kind for kind in options.kinds.split(",") if kind]
        every = options.seconds / (len(kinds) + 1)
        return tuple((every * number, kind) for number, kind in enumerate(kinds, 1))
    return tuple((at, what) for at, what in TRACE if at < options.seconds)


def all_together(options: argparse.Namespace, folder: Path) -> list[Result]:
    results: list[Result] = []

    def one(number: int, contender: Contender) -> None:
        time.sleep(number * APART_S)  # the launchers' faults do not meet on the two cores
        place = folder / contender.name.replace(" ", "-")
        results.append(go(contender, options.seconds, place, options.port + number))

    chosen = contenders(options)
    threads = [
        threading.Thread(target=one, args=(number, contender))
        for number, contender in enumerate(chosen)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [contender.name for contender in chosen]
    return sorted(results, key=lambda result: names.index(result.name))


def report(results: list[Result]) -> None:
    whole = max(result.saved for result in results)
    print("| launcher | steps kept | of undisturbed | starts | gave up | tries of the mistake |")
    print("| --- | --- | --- | --- | --- | --- |")
    for one in results:
        gave_up = "" if one.ended_s is None else f"{one.ended_s:.0f} s (status {one.status})"
        share = f"{one.saved / whole:.3f}"
        cells = [one.name, str(one.saved), share, str(one.starts), gave_up, str(one.tried_again)]
        print("|", " | ".join(cells), "|")
    struck = [result for result in results if result.costs]
    names = [result.name for result in struck]
    print(f"\n| s until the job is further than before | {' | '.join(names)} |")
    print("| --- " * (len(names) + 1) + "|")
    for number, (what, _) in enumerate(struck[0].costs if struck else []):
        cells = [result.costs[number][1] for result in struck]
        print(
            f"| {what} |", " | ".join("" if c == float("inf") else f"{c:.1f}" for c in cells), "|"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each run")
    parser.add_argument("--ft", default="", help="an environment with nvidia-resiliency-ext")
    parser.add_argument("--only", default="", help="names of launchers, with commas")
    parser.add_argument("--kinds", default="", help="faults at even distances, for a trial")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--port", type=int, default=28100, help="the first of six")
    parser.add_argument("--keep", default="", help="a directory for logs; it must not exist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        place = Path(options.keep or folder)
        place.mkdir(exist_ok=not options.keep)
        results = all_together(options, place)
    report(results)


if __name__ == "__main__":
    main()
