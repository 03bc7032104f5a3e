"""A job on whose host h2 a GPU fails once FLAG is there; elsewhere it waits, and is done later.

bad_card.py FLAG
"""

import os
import signal
import sys
import time
from pathlib import Path

host, flag = os.uname().nodename, Path(sys.argv[1])
flag.with_name(f"up-{host}").touch()
if host == "h2":
    while not flag.exists():
        time.sleep(0.05)  # no event tells of a file
    print("NVRM: Xid (PCI:0000:3b:00): 48, pid=7, An uncorrectable double bit error (DBE)")
    sys.stdout.flush()
    sys.exit("RuntimeError: CUDA error: uncorrectable ECC error encountered")
if os.environ["SAFERUN_ATTEMPT"] == "1":
    signal.pause()
print(f"done on {host}", flush=True)
