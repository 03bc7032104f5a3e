"""Forty processes that fork and exit all the time, and 160 that sit in sessions of their own."""

import os
import time

from roster import child, join, stay

began = time.monotonic()


def run_away():
    """Never be the process that was seen a moment ago."""
    while time.monotonic() < began + 90:  # a bomb that nobody stops any more stops
        if os.fork():
            os._exit(0)
        time.sleep(0.05)


for _ in range(40):
    child("", run_away)
for _ in range(160):
    child("sitting", os.setsid)
join("agent")
stay()
