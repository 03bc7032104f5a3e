"""Begin a run in BASE, record its success, and live on until stdin ends. Prints the run's path."""

import sys

from saferun.journal.event_types import RunEnded
from saferun.journal.writer import Journal
from saferun.system.redact import Masker

journal = Journal.begin(sys.argv[1], "r", Masker({}, []), say=print)
journal.event(RunEnded(0, ""))
print(journal.path, flush=True)
sys.stdin.read()
