"""Tasks of Ray that run jobs of two ranks under torchrun: `ray_tasks.py FOLDER`; prints what the
driver gets of one that succeeds, of one that fails, and of two that are cancelled while the job
stays, the second one with the end of its worker."""

import os
import sys
import time
from pathlib import Path

import ray

import saferun

folder = Path(sys.argv[1])
ray.init(num_cpus=1, num_gpus=2, include_dashboard=False, log_to_driver=False)


@ray.remote(num_gpus=2)
def train(*words: str) -> tuple[saferun.RunResult, list[str]]:
    lines: list[str] = []
    argv = ["--nproc-per-node=2", *words]
    return saferun.run(argv, cwd=folder, check=True, on_line=lines.append), lines


def pids(state: str) -> list[str]:
    return [path.name.removeprefix(f"{state}-") for path in folder.glob(f"{state}-*")]


def cancel(*, force: bool) -> list[str]:
    """Cancel a task when both of its ranks are up; return their process ids."""
    staying = train.remote("job.py", "stay")
    while len(up := pids("up")) < 2:
        time.sleep(0.05)  # between two looks whether both ranks are up, which leave a file
    ray.cancel(staying, force=force)
    try:
        ray.get(staying)
    except ray.exceptions.TaskCancelledError:
        return up
    raise AssertionError("it was not cancelled")


def left(of: list[str]) -> str:
    alive = sum(os.path.exists(f"/proc/{pid}") for pid in of)
    return f"down {len(set(of).intersection(pids('down')))}, alive {alive}"


result, lines = ray.get(train.remote("rank.py"))
print(*filter(lambda line: "saferun:" not in line, lines), sep="\n")
print("returned", result.status, result.outcome, flush=True)
try:
    ray.get(train.remote("job.py", "fail"))
except saferun.RunError as error:
    print("raised", error.result.status, error.result.diagnosis.root_line, flush=True)
print("cancelled by interrupt:", left(cancel(force=False)), flush=True)
ranks = cancel(force=True)
while left(ranks) != "down 0, alive 0":  # Ray does not wait for what its worker started
    time.sleep(0.05)  # between two looks whether the last rank has gone
print("cancelled by force:", left(ranks))
