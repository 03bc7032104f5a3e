"""A job with a worker in a session of its own; it ends when it is asked to, the worker never.

A user signal ends it only where JOB_STATUS says with which status; then any signal does.

recording_torchrun.py runs it. `signals` in RECORDS has the names of the signals that came, and
`up` is there once they are handled.
"""

import os
import signal
import subprocess
import sys
import time

place = os.environ["RECORDS"]
worker = "import signal as s; [s.signal(n, s.SIG_IGN) for n in (1, 2, 15)]\nwhile True: s.pause()"
quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
subprocess.Popen([sys.executable, "-ISc", worker], start_new_session=True, **quiet)


def record(number, frame):
    with open(place + "/signals", "a", encoding="utf-8") as file:
        file.write(signal.Signals(number).name + " ")
    if number not in (signal.SIGUSR1, signal.SIGUSR2) or "JOB_STATUS" in os.environ:
        sys.exit(int(os.environ.get("JOB_STATUS", "9")))


for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), record)
open(place + "/up", "w", encoding="utf-8").close()
while True:
    time.sleep(0.1)
