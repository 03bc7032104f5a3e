"""As another user, from whom /proc hides processes: does PID live, and one that is nowhere?"""

import ctypes
import os
import sys

from saferun.base import proc
from saferun.system import procfs

libc = ctypes.CDLL(None, use_errno=True)
os.unshare(os.CLONE_NEWNS) if hasattr(os, "unshare") else libc.unshare(0x20000)
libc.mount(None, b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
if libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid=2"):
    sys.exit(os.strerror(ctypes.get_errno()))
record = procfs.this_process() | {"pid": int(sys.argv[1]), "start": 1}
os.setgroups([])
os.setgid(12345)
os.setuid(12345)
print(proc.stat(record["pid"]), procfs.lives(record), procfs.lives(record | {"pid": 4194303}))
