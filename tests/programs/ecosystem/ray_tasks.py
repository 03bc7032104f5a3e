"""Two tasks of Ray: `ray_tasks.py FOLDER`; prints how a job of two ranks ends under torchrun, and
what comes of a task that is cancelled while its job stays."""

import sys
import time
from pathlib import Path

import ray

import saferun

folder = Path(sys.argv[1])
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)


@ray.remote
def train(words: list[str], **options: object) -> saferun.RunResult:
    return saferun.run(words, cwd=folder, **options)


def wait_for(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.05)


print("status", ray.get(train.remote(["--nproc-per-node=2", "rank.py"])).status, flush=True)
staying = train.remote(["job.py", "stay"], settings={"launcher": "python"})
wait_for("up")
ray.cancel(staying)
try:
    ray.get(staying)
except ray.exceptions.TaskCancelledError as error:
    print("raised", type(error).__name__, flush=True)
wait_for("down")  # before Ray ends its worker, which would end the job, too
