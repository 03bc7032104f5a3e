"""A rank that waits for a file `go-ATTEMPT` in a folder, and then fails, otherwise in each attempt.

told_to_fail.py FOLDER
"""

import os
import sys
import time
from pathlib import Path

MESSAGES = (
    "CUDA error: unspecified launch failure",
    "NCCL error: remote process exited or there was a network error",
    "CUDA error: unspecified launch failure",
)
folder, attempt = Path(sys.argv[1]), int(os.environ["SAFERUN_ATTEMPT"])
(folder / f"here-{attempt}").touch()
while not (folder / f"go-{attempt}").exists():
    time.sleep(0.01)
raise RuntimeError(MESSAGES[attempt - 1])
