"""Add mitigations to the history, one change each: NAME COUNT GO.

Reads the FIFO GO to its end first, so that two of these begin at the same time. With NO_LOCK in the
environment there is no lock, to show what it is for.
"""

import contextlib
import os
import sys

from saferun.journal import file_lock, mitigation_history
from saferun.journal.mitigation_history import Entry, Key

name, count, go = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if os.environ.get("NO_LOCK"):
    file_lock.exclusive = lambda path, wait_s: contextlib.nullcontext()
mitigation_history.LOCK_S = mitigation_history.DISK_S = 120.0

print("ready", flush=True)
with open(go) as fifo:
    fifo.read()
for number in range(count):
    new = Entry(Key(name, "", "", ""), f"m{number}", "segfault", None, float(number))
    mitigation_history.change(os.environ, lambda known, n=new: mitigation_history.merge(known, [n]))
