"""Print a line; with `stay`, touch `up-PID`, stay until it is interrupted, and rename that to
`down-PID`; with `fail`, raise."""

import os
import sys
import time
from pathlib import Path

os.write(1, b"the job's line\n")  # in one piece: torchrun gives its ranks -u
if sys.argv[1:] == ["stay"]:
    up = Path(f"up-{os.getpid()}")
    try:
        up.touch()
        while True:
            time.sleep(0.1)
    finally:
        up.rename(f"down-{os.getpid()}")
if sys.argv[1:] == ["fail"]:
    raise ValueError(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES')}")
