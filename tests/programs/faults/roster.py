"""What the small jobs of these tests have in common: `from roster import *`.

`join(role)` enters the roster; `kin()` starts what ranks start: a plain child, one that left its
group, and one that left everything. All that descends from a job has its lock on `ROSTER.lives`.
"""

import fcntl
import os
import signal
import subprocess  # noqa: F401 - for those who import all
import sys  # noqa: F401 - for those who import all
import time

ROSTER = os.environ["ROSTER"]
LIVES = os.open(f"{ROSTER}.lives", os.O_RDWR | os.O_CREAT)
fcntl.flock(LIVES, fcntl.LOCK_SH)


def join(role):
    with open(ROSTER, "a", encoding="utf-8") as file:
        file.write(f"{role} {os.getpid()}\n")


def stay():
    while True:
        time.sleep(0.1)  # Python handles a signal just before signal.pause() after the next one


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)


def child(role, *steps):
    if os.fork() == 0:
        for step in steps:
            step()
        join(role)
        stay()


def orphan():
    if os.fork():
        os._exit(0)


def kin():
    child("worker")
    child("grouped", lambda: os.setpgid(0, 0))
    child("daemon", os.setsid, orphan)


def note(*names):
    def write(number, frame):
        join(signal.Signals(number).name)

    for name in names:
        signal.signal(getattr(signal, name), write)
