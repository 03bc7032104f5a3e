"""Print a line; with `stay`, touch `up` and stay until it is ended."""

import signal
import sys
from pathlib import Path

print("the job's line", flush=True)
if sys.argv[1:] == ["stay"]:
    Path("up").touch()
    signal.pause()
