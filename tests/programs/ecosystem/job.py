"""Print a line; with `stay`, touch `up`, stay until it is interrupted, and touch `down`."""

import signal
import sys
from pathlib import Path

print("the job's line", flush=True)
if sys.argv[1:] == ["stay"]:
    Path("up").touch()
    try:
        signal.pause()
    finally:
        Path("down").touch()
