"""A rank that lists all files below some places, and is killed in the first attempt.

list_files.py LIST PLACE...   LIST gets a line `MODE UID PATH` for each, in octal
"""

import os
import signal
import sys
from pathlib import Path

listed, *places = sys.argv[1:]
lines = []
for place in places:
    for folder, folders, files in os.walk(place):
        for name in folders + files:
            try:
                status = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:  # gone meanwhile
                continue
            lines.append(f"{status.st_mode:o} {status.st_uid} {os.path.join(folder, name)}\n")
with Path(listed).open("a", encoding="utf-8") as file:
    file.write("".join(lines))
if os.environ["SAFERUN_ATTEMPT"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
