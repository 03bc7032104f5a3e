"""Crash in native code below so many calls, beside a second thread."""

import faulthandler
import sys
import threading

faulthandler.enable()


def deep(n):
    if n:
        deep(n - 1)
    else:
        faulthandler._sigsegv()


threading.Thread(target=threading.Event().wait, daemon=True).start()
deep(int(sys.argv[1]))
