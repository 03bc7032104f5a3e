"""A Python program that runs a job with saferun's API, and says how that ended for it.

    caller.py HOW WORDS...

With `raises` its handler of SIGALRM raises; with `line` its function for a line does; with
`thread` another thread interrupts this one, which blocks SIGINT, as Ray does to cancel a task, when
both ranks are up; with `thread-lines` there is a function for a line, too.
"""

import _thread
import signal
import sys
import threading
import time
from pathlib import Path

import saferun

how, *words = sys.argv[1:]


def alarm(*_: object) -> None:
    raise TimeoutError("too long")


def line(text: str) -> None:
    print("line", text, flush=True)
    if how == "line" and text == "step 2 loss 1.0":
        raise LookupError(text)


def interrupt() -> None:
    while len(list(Path("out").glob("here-1-*"))) < 2:
        time.sleep(0.05)
    _thread.interrupt_main()


signal.signal(signal.SIGALRM, alarm)
if how.startswith("thread"):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Thread(target=interrupt, daemon=True).start()
try:
    result = saferun.run(words, on_line=line if "line" in how else None)
except BaseException as error:
    print("raised", type(error).__name__, flush=True)
    sys.exit(3)
print("status", result.status)
