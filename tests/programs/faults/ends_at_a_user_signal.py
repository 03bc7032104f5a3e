"""A rank that writes SIGUSR1 and SIGTERM into the file of its argument, and ends at the first."""

import os
import signal
import sys
import time


def note(number, frame):
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write(f"{signal.Signals(number).name}\n")
    if number == signal.SIGUSR1:
        sys.exit(0)


for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, note)
open(sys.argv[1] + f".{os.getpid()}", "w", encoding="utf-8").close()
while True:
    time.sleep(0.1)
