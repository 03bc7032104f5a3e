"""Write a journal in BASE while no file may exceed 1000 bytes; print how much was said and what."""

import resource
import sys

from saferun.journal.event_types import Fault, RunEnded
from saferun.journal.writer import Journal
from saferun.system.redact import Masker

messages = []
journal = Journal.begin(sys.argv[1], "r", Masker({}, []), say=messages.append)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for n in range(20):
    journal.event(Fault(str(n), "x" * 100))
journal.tails(1, b"x" * 5000, b"")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
journal.event(RunEnded(0, ""))
print(len(messages), *messages)
