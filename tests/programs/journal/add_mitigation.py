"""Add the mitigation NAME to the history; with `pause`, read, wait for stdin to end, then write.

Reports on stdout: `read` before that wait, `held` where another process has the lock, `done`. With
NO_LOCK in the environment there is no lock, to show what it is for.
"""

import contextlib
import os
import sys

from saferun.journal import file_lock, history_file, mitigation_history
from saferun.journal.mitigation_history import Entry, Key

name, pause = sys.argv[1], sys.argv[2:] == ["pause"]
if os.environ.get("NO_LOCK"):
    file_lock.exclusive = lambda path, wait_s: contextlib.nullcontext()


def edit(known):
    if pause:
        print("read", flush=True)
        sys.stdin.read()
    return mitigation_history.merge(known, [Entry(Key(name, "", "", ""), "m", "k", None, 1.0)])


history_file.DISK_S = 150.0
try:
    history_file.LOCK_S = 0.0
    mitigation_history.change(os.environ, edit)
except file_lock.HeldError:
    print("held", flush=True)
    history_file.LOCK_S = 120.0
    mitigation_history.change(os.environ, edit)
print("done", flush=True)
