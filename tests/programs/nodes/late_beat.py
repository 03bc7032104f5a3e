"""An agent that ends while its heartbeat is inside torch, and comes back as the interpreter ends.

late_beat.py STATUS
"""

import datetime
import sys
import threading
import time

import torch.distributed as dist

from saferun.inject.node.node_watch import NodeWatch

WAIT_S = 2.0  # inside torch; the process ends meanwhile
inside = threading.Event()


class Late:
    """Deleted while the interpreter ends, which takes longer than the heartbeat is away."""

    def __del__(self, sleep=time.sleep):  # a default, since `time` may be gone by then
        sleep(2 * WAIT_S)  # stands for what else ends a process slowly: the heartbeat returns first


class Hanging:
    """A store that answers no request in time."""

    def __init__(self):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True)

    def clone(self):
        return self

    def set(self, key, value):
        inside.set()
        self.store.wait(["never"], datetime.timedelta(seconds=WAIT_S))


late = Late()
watch = NodeWatch(Hanging(), 0, {0: "h0", 1: "h1"}, 1, lambda why, nodes: None)
watch.start()
inside.wait()
watch.stop()
watch.leave_with(int(sys.argv[1]))
sys.exit(int(sys.argv[1]))
