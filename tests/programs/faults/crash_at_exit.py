"""Every rank does its work, and crashes while its interpreter shuts down.

With the argument "unless-second", rank 0 works on while the others crash, and the second attempt
ends well.
"""

import os
import signal
import sys


class Crash:
    """Dies when the interpreter lets go of it, after the last line and all atexit functions."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


kept = Crash()
if sys.argv[1:] == ["unless-second"]:
    if os.environ["SAFERUN_ATTEMPT"] == "2":
        os._exit(0)
    if os.environ["RANK"] == "0":
        signal.pause()
print("saved", flush=True)
