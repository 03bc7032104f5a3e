"""Ends its descendants, a chain of forks among them, but for one child; prints what it left."""

import os
import subprocess
import time

from saferun.base.prctl import become_subreaper
from saferun.keeper.process_tree import Family

become_subreaper()
spared = subprocess.Popen(["sleep", "1000"])
reading, writing = os.pipe()  # the end of `reading` comes when the chain has none left
for group in (0, spared.pid):  # one has a group of its own, the other the spared child's
    if os.fork() == 0:
        os.close(reading)
        os.setpgid(0, group and os.getpgid(group))
        began = time.monotonic()
        while time.monotonic() < began + 90:
            if not group and os.fork():
                os._exit(0)
        os._exit(0)
os.close(writing)
left = Family(lambda: [spared.pid]).end()[1]
os.set_blocking(reading, False)
print(left, os.read(reading, 1), spared.poll())
spared.kill()
