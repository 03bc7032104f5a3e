"""A process that does one piece of work and asks to be replaced, until enough is done.

    recycled.py PIECES [PROGRESS]

It keeps its work in the directory that the processes share, and writes PROGRESS (by default 1)
into its requests. With a negative number it kills itself instead, its work counted by one byte.
"""

import os
import signal
import sys
from pathlib import Path

from _saferun.inject import contract, hook_runner

pieces, progress = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
here = hook_runner.current(os.environ[contract.VARIABLE])
done = Path(here.state, "done")
with done.open("a", encoding="utf-8") as file:
    file.write(f"piece of attempt {os.environ['SAFERUN_ATTEMPT']}\n")
if len(done.read_text(encoding="utf-8").splitlines()) >= pieces:
    print(done.read_text(encoding="utf-8"), end="", flush=True)
    sys.exit(0)
if progress < 0:
    with Path(here.state, contract.PROGRESS).open("ab") as file:
        file.write(b".")
    os.kill(os.getpid(), signal.SIGKILL)
assert here.recycle("one piece is enough", kind="cuda-launch-failure", progress=progress)
sys.exit(contract.RECYCLE_STATUS)
