"""What of torchrun the tests need that are not about torchrun; it imports no torch.

It starts the ranks of one node as sessions of their own. When one fails, or when it is asked to
end, it ends them all and exits with 1.
"""

import argparse
import os
import signal
import subprocess
import sys


class AskedError(Exception):
    """A signal that asks for the end has come."""


def asked(number: int, frame: object) -> None:
    raise AskedError(number)


parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--nproc-per-node", type=int, default=1)
parser.add_argument("--rdzv-endpoint")
parser.add_argument("-m", "--module", action="store_true")
parser.add_argument("script")
parser.add_argument("arguments", nargs=argparse.REMAINDER)
options = parser.parse_args()
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"):
    signal.signal(getattr(signal, name), asked)
command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
count = options.nproc_per_node
ranks: list[subprocess.Popen[bytes]] = []
status = 1
try:
    for rank in range(count):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        ranks.append(subprocess.Popen(command, env=env, start_new_session=True))
    while ranks:
        pid, ended = os.wait()
        ranks = [rank for rank in ranks if rank.pid != pid]
        if ended:
            break
    else:
        status = 0
except AskedError:
    pass
for rank in ranks:
    rank.terminate()
for rank in ranks:
    rank.wait()
sys.exit(status)
