import os
import signal
import sys

from _saferun_inject import context, contract

here = context.current(os.environ[contract.VARIABLE])


def end(*_):
    here.recycle("why", progress=1)
    sys.exit(contract.RECYCLE_STATUS)


signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
signal.pause()
