"""The job of benchmarks/peers.py: two ranks write numbered lines, then do what is asked.

`crash`: rank 1 dies of SIGSEGV once, and the next start ends well. `stay`: they stay until killed.
What a rank wrote is counted in a file, so that lines that did not arrive are known.
"""

import os
import signal
import sys
import time

what, lines, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
rank = os.environ["RANK"]
os.write(1, f"first {time.monotonic_ns()}\n".encode())
for number in range(lines):
    os.write(1, f"line {rank} {number} {'x' * 80}\n".encode())  # one write: ranks do not mix lines
with open(f"{folder}/wrote-{rank}", "a") as file:
    file.write(f"{lines}\n")
if what == "stay":
    while True:
        signal.pause()
if rank == "1" and not os.path.exists(f"{folder}/crashed"):
    while not os.path.exists(f"{folder}/wrote-0"):
        time.sleep(0.01)  # the other is ended with this one, and would not count its lines
    with open(f"{folder}/crashed", "w") as file:
        file.write(str(time.monotonic_ns()))
    os.kill(os.getpid(), signal.SIGSEGV)
time.sleep(0.5)  # the other rank is still at work when rank 1 crashes
