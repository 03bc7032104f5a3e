"""A rank that writes down SIGUSR1 and SIGTERM. Arguments: a file, and "ends" or "stays"."""

import os
import signal
import sys


def note(number, frame):
    with open(sys.argv[1], "a") as file:
        file.write(f"{signal.Signals(number).name}\n")
    if number == signal.SIGUSR1 and sys.argv[2] == "ends":
        sys.exit(0)


for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, note)
open(sys.argv[1] + f".{os.getpid()}", "w").close()
while True:
    signal.pause()
