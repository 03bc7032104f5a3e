"""Begin a run in BASE and write its plan and an event; print the modules that this has imported."""

import json  # noqa: F401 - the launch has it by then, or needs it for the plan in any case
import sys

from saferun.journal.event_types import Started
from saferun.journal.writer import Journal
from saferun.system.redact import Masker

before = set(sys.modules)
masker = Masker({"HF_TOKEN": "hf_0123456789abcdef"}, ["t.py"])
journal = Journal.begin(sys.argv[1], "r", masker, say=print)
env = {f"V{n}": {"value": "1", "origin": "profiles/h100.yaml", "why": "w" * 80} for n in range(20)}
journal.plan({"schema": 1, "command": ["torchrun", "t.py"], "env": env})
journal.event(Started(1, 2))
print(*sorted(set(sys.modules) - before))
