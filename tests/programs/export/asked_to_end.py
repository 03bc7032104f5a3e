"""A job that Slurm asks to end: it records the signal and ends with JOB_STATUS, or goes on.

recording_torchrun.py runs it. `signals` in RECORDS has the names of the signals that came, and
`up` is there once they are handled.
"""

import os
import signal
import sys

place = os.environ["RECORDS"]


def record(number, frame):
    with open(place + "/signals", "a") as file:
        file.write(signal.Signals(number).name + " ")
    if "JOB_STATUS" in os.environ:
        sys.exit(int(os.environ["JOB_STATUS"]))


for one in (signal.SIGUSR2, signal.SIGTERM):
    signal.signal(one, record)
open(place + "/up", "w").close()
while True:
    signal.pause()
