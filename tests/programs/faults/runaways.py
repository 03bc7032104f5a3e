"""Four chains of processes, each of which forks the next one and exits at once.

One that nobody has ended in LIMIT_S enters the roster as "outlived".
"""

import os
import time

from roster import ROSTER, join, stay

LIMIT_S = 90

began = time.monotonic()
for _ in range(4):
    if os.fork() == 0:
        while time.monotonic() < began + LIMIT_S and not os.path.exists(f"{ROSTER}.stop"):
            if os.fork():
                os._exit(0)
        join("outlived")
        os._exit(0)
join("agent")
stay()
