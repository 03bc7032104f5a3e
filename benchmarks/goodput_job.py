"""The example, with numbered checkpoints, slow steps and planted faults; goodput.py runs it.

    goodput_job.py --place DIR --resume none|auto|FILE [--step-s S] [options of the example]

A step takes `--step-s` seconds, as a GPU's step would: the rest of it is slept. Rank 0 saves
`DIR/out/checkpoint-N.pt` in place, as most scripts do. `--resume auto` goes on from the newest one
that is a whole zip. A file in DIR with the name of a fault plants it; each rank leaves its pid and
its parent's in `DIR/pids`, and rank 0 its starts and steps with their times in `DIR/steps`.
"""

import argparse
import os
import signal
import sys
import threading
import time
import zipfile
from datetime import timedelta
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
KEPT = 3  # checkpoints
HEURISTICS = "torch/_inductor/runtime/triton_heuristics.py"  # where a real one fails
AUTOTUNING = """
def autotune_to_one_config():
    benchmark_all_configs()
def benchmark_all_configs():
    raise RuntimeError("Triton Error [CUDA]: invalid argument")
autotune_to_one_config()
"""
FULL = (
    "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 79.15 GiB of "
    "which 20.25 MiB is free. Process 4711 has 77.90 GiB memory in use. Including non-PyTorch "
    "memory, this process has 1.20 GiB memory in use. Of the allocated memory 700.00 MiB is "
    "allocated by PyTorch, and 12.00 MiB is reserved by PyTorch but unallocated."
)


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--place", type=Path, required=True)
    parser.add_argument("--resume", required=True)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--timeout-s", type=float, default=0.0, help="of collectives; 0: torch's")
    known, sys.argv[1:] = parser.parse_known_args()
    return known


OPTIONS = options()
PLACE = OPTIONS.place
(PLACE / "pids" / f"{RANK}.tmp").write_text(f"{os.getpid()} {os.getppid()}")
os.rename(PLACE / "pids" / f"{RANK}.tmp", PLACE / "pids" / str(RANK))

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import torch  # noqa: E402 - the pids first: a fault may strike a start
import train_gpt  # noqa: E402 - it lies in the folder named above


def planted(name):
    return (PLACE / name).exists()


def newest():
    """Return the newest checkpoint that is a whole zip; None without one."""
    names = sorted((PLACE / "out").glob("checkpoint-*.pt"), key=lambda path: path.stat().st_mtime)
    return next((path for path in reversed(names) if zipfile.is_zipfile(path)), None)


def save(path, state):
    """Write a file of its own for each step, in place, and remove the oldest."""
    path = path.with_name(f"checkpoint-{state['step']}.pt")
    torch.save(state, path)
    if planted("cut"):
        (PLACE / "cut").unlink()
        os.truncate(path, path.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    for old in sorted(path.parent.glob("checkpoint-*.pt"), key=os.path.getmtime)[:-KEPT]:
        old.unlink(missing_ok=True)
    note("saved", state["step"])


def note(what, step):
    with (PLACE / "steps").open("a") as file:
        file.write(f"{time.time():.2f} {what} {step}\n")


def fail_as_planted():
    """Fail as the world around the job makes it, in any step and at any start."""
    if RANK == 0 and planted("memory"):
        raise torch.OutOfMemoryError(FULL)
    if planted("autotune") and os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE") != "0":
        exec(compile(AUTOTUNING, HEURISTICS, "exec"), {})
    if planted("mistake"):
        print(undefined_name)  # noqa: F821 - the mistake
    if planted(f"hang-{RANK}"):
        (PLACE / f"hang-{RANK}").unlink()
        threading.Event().wait()


def heartbeats():
    """Return what tells NVIDIA's launcher that a rank works; it needs the script's help."""
    if "FT_RANK_MONITOR_IPC_SOCKET" not in os.environ:
        return lambda: None
    from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

    client = RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


class Job(train_gpt.Trainer):
    """The example's trainer."""

    def join(self):
        if OPTIONS.timeout_s:
            train_gpt.dist.init_process_group = _with_timeout(timedelta(seconds=OPTIONS.timeout_s))
        super().join()
        self.beat = heartbeats()

    def build(self):
        if self.rank == 0:
            note("start", 0)
        fail_as_planted()
        super().build()
        found = newest() if OPTIONS.resume == "auto" else OPTIONS.resume
        if found not in (None, "none"):
            self.path = Path(found)
            self.restore()
        self.due = time.monotonic()

    def update(self, x, y):
        loss = super().update(x, y)
        fail_as_planted()
        self.due = max(self.due + OPTIONS.step_s, time.monotonic())
        time.sleep(max(0.0, self.due - time.monotonic()))  # the length of a step, as on a GPU
        if self.rank == 0:
            note("step", self.step)
        self.beat()
        return loss


def _with_timeout(seconds):
    original = train_gpt.dist.init_process_group
    return lambda backend: original(backend, timeout=seconds)


def main():
    sys.argv += ["--out", str(PLACE / "out")]
    train_gpt.save = save
    Job(train_gpt.parse_arguments()).train()


if __name__ == "__main__":
    main()
