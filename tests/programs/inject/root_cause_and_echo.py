import os
import pathlib
import sys
import time

flag, old = pathlib.Path(os.environ["FLAG"]), sys.excepthook


def slowly(*a):  # the root's process lives on for a while, as with a slow abort
    old(*a)
    flag.touch()
    time.sleep(3)


if os.environ["RANK"] == "1":
    sys.excepthook = slowly
    raise ValueError("the root cause")
deadline = time.time() + 60
while not flag.exists() and time.time() < deadline:
    time.sleep(0.05)
wait = time.time() + 1.1  # torch compares whole seconds
while time.time() < wait:
    time.sleep(0.05)
raise RuntimeError("the echo")
