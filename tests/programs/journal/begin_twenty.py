"""When a byte comes, begin twenty runs in BASE with an event that has a WORD; print their paths."""

import sys

from saferun.journal import writer
from saferun.journal.event_types import Fault
from saferun.system.redact import Masker

writer.BEGIN_S = writer.WRITE_S = 60.0  # a slow disk is another test's
print("ready", flush=True)
sys.stdin.read(1)
for n in range(20):
    journal = writer.Journal.begin(sys.argv[1], f"r{n}", Masker({}, []), say=print)
    journal.event(Fault(sys.argv[2], ""))
    print(journal.path)
