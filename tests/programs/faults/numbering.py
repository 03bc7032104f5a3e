"""Write numbered lines to both streams for ever, and note in a file how many have been written.

numbering.py COUNT_FILE [SECONDS]   with a pause of so many between two pairs of lines
"""

import mmap
import os
import sys
import time

path, *pause = sys.argv[1:]
with open(path, "w+b") as file:
    file.truncate(8)
    count = mmap.mmap(file.fileno(), 8)
number = 0
while True:
    number += 1
    os.write(1, b"out %d\n" % number)
    os.write(2, b"err %d\n" % number)
    count[:] = number.to_bytes(8, "little")
    if pause:
        time.sleep(float(pause[0]))
