"""Stands for torch.distributed.run: it leaves a cycle and what it registered for its end."""

import atexit
import gc
import sys

gc.set_threshold(0)  # no search but the last one
born = gc.get_freeze_count()  # Python 3.12 freezes some itself
atexit.register(lambda: print("registered, frozen", gc.get_freeze_count() - born))


class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        print("found")


cycle = Cycle()
del cycle
sys.exit(3)
