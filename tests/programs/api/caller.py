"""A Python program that runs a job with saferun's API, and says how that ended for it.

    caller.py HOW WORDS...

With `raises` its handler of SIGALRM raises; with `line` its function for a line does.
"""

import signal
import sys

import saferun

how, *words = sys.argv[1:]


def alarm(*_: object) -> None:
    raise TimeoutError("too long")


def line(text: str) -> None:
    print("line", text, flush=True)
    if how == "line" and text == "step 2 loss 1.0":
        raise LookupError(text)


signal.signal(signal.SIGALRM, alarm)
try:
    result = saferun.run(words, on_line=None if how == "raises" else line)
except BaseException as error:
    print("raised", type(error).__name__, flush=True)
    sys.exit(3)
print("status", result.status)
