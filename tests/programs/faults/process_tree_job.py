"""A rank as jobs have them: two data workers, of rank 0 a detached helper, numbered lines.

    process_tree_job.py FOLDER STEPS [ERROR_STEP]

Each step asks both data workers and writes a line to stdout and one to stderr. In FOLDER
`count-ATTEMPT-RANK` counts them, and `pids-ATTEMPT-RANK` names the processes. A data worker that
has died is reported in torch's words; at ERROR_STEP the script has a mistake of its own.
"""

import mmap
import os
import signal
import sys
import time
from pathlib import Path

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
error_step = int(sys.argv[3]) if len(sys.argv) > 3 else 0
attempt, rank = os.environ["SAFERUN_ATTEMPT"], os.environ["RANK"]
workers: list[tuple[int, int, int]] = []  # pid, where to ask, where to read


def data_worker() -> tuple[int, int, int]:
    """Start one; it outlives its rank, as one in a system call does."""
    asked, ask = os.pipe()
    answers, answer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(asked)
        os.close(answer)
        return pid, ask, answers
    for fd in (ask, answers, *(fd for _, *fds in workers for fd in fds)):
        os.close(fd)
    while os.read(asked, 1):
        os.write(answer, b".")
    while True:
        signal.pause()


def helper() -> int:
    """Start a process that detaches itself; return its pid."""
    reported, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        pid = os.fork()
        if pid:
            os.write(tell, str(pid).encode())
            os._exit(0)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        while True:
            signal.pause()
    os.wait()
    return int(os.read(reported, 20))


def batch() -> None:
    """Ask each data worker for its part."""
    for pid, ask, answers in workers:
        try:
            os.write(ask, b".")
            answered = os.read(answers, 1)
        except BrokenPipeError:
            answered = b""
        if not answered:
            died(pid)


def died(pid: int) -> None:
    raise RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: Killed. ")


workers += [data_worker()]
workers += [data_worker()]
names = [f"rank {os.getpid()}", *(f"data {pid}" for pid, _, _ in workers)]
names += [f"helper {helper()}"] if rank == "0" else []
(folder / f"pids-{attempt}-{rank}.new").write_text("\n".join(names), encoding="utf-8")
(folder / f"pids-{attempt}-{rank}.new").rename(folder / f"pids-{attempt}-{rank}")
with open(folder / f"count-{attempt}-{rank}", "w+b") as file:
    file.truncate(8)
    count = mmap.mmap(file.fileno(), 8)
for step in range(1, steps + 1):
    batch()
    for fd, name in ((1, "out"), (2, "err")):
        os.write(fd, f"{name} {attempt} {rank} {step}\n".encode())
    count[:] = step.to_bytes(8, "little")
    if step == error_step:
        raise ValueError("size mismatch in the user's own code")
    time.sleep(0.01)
for pid, _, _ in workers:
    os.kill(pid, signal.SIGKILL)
