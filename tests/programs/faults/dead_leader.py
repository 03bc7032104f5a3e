"""Exit with 1 while a process lives whose leader has left and whose other thread runs on."""

import ctypes
import os
import sys
import threading
import time

from roster import ROSTER, join, wait_for


def run_on():
    while state() != "Z":  # of the leader
        time.sleep(0.01)
    join("thread")
    while True:
        time.sleep(1)


def state():
    with open(f"/proc/{os.getpid()}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0]


if os.fork() == 0:
    os.setsid()
    threading.Thread(target=run_on).start()
    ctypes.CDLL(None).pthread_exit(None)
wait_for(ROSTER)
sys.exit(1)
