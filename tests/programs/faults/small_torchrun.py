"""What of torchrun the tests need that are not about torchrun; it imports no torch.

It starts the ranks of one node as sessions of their own. When one fails, or when it is asked to
end, it ends them all and exits with 1. With SMALL_TORCHRUN_REPORTS it says so in torchrun's words.
"""

import argparse
import os
import signal
import subprocess
import sys


class AskedError(Exception):
    """A signal that asks for the end has come."""


def report(argv: str) -> None:
    if "SMALL_TORCHRUN_REPORTS" in os.environ:
        print(argv, file=sys.stderr, flush=True)


def asked(number: int, frame: object) -> None:
    """End the wait for the ranks; while they start, what is asked waits until all are known."""
    early.append(number)
    if all_started:
        raise AskedError(number)


parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--nproc-per-node", type=int, default=1)
parser.add_argument("--rdzv-endpoint")
parser.add_argument("-m", "--module", action="store_true")
parser.add_argument("script")
parser.add_argument("arguments", nargs=argparse.REMAINDER)
options = parser.parse_args()
module = ["-m"] if options.module else []
command = [sys.executable, "-u", *module, options.script, *options.arguments]
count = options.nproc_per_node
ranks: list[subprocess.Popen[bytes]] = []
early: list[int] = []
all_started = False
status = 1
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
    signal.signal(getattr(signal, name), asked)
try:
    for rank in range(count):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
    started = list(ranks)
    all_started = True
    if early:
        raise AskedError(early[0])
    while ranks:
        pid, ended = os.wait()
        local = next(n for n, rank in enumerate(started) if rank.pid == pid)
        ranks = [rank for rank in ranks if rank.pid != pid]
        if ended:
            code = os.waitstatus_to_exitcode(ended)
            report(f"failed (exitcode: {code}) local_rank: {local} (pid: {pid}) of binary: python")
            break
    else:
        status = 0
except AskedError as number:
    report(f"Received {number} death signal, shutting down workers")
for rank in ranks:
    rank.terminate()
for rank in ranks:
    rank.wait()
sys.exit(status)
