"""Diagnose logs with the unpacked bundle alone: BUNDLE; [text, exit code] a line on stdin."""

import json
import sys

sys.path.insert(0, sys.argv[1])
sys.modules["yaml"] = None
from saferun.diagnosis import signatures  # noqa: E402 (from BUNDLE)
from saferun.diagnosis.deciding import classify  # noqa: E402 (from BUNDLE)
from saferun.diagnosis.evidence import Evidence  # noqa: E402 (from BUNDLE)
from saferun.diagnosis.reading import log_reader  # noqa: E402 (from BUNDLE)

known = signatures.load({})
for line in sys.stdin:
    text, code = json.loads(line)
    log = log_reader.read((text.encode(),))
    print(json.dumps(classify.classify(Evidence(log=log, exit_code=code), known)))
assert classify.__file__.startswith(sys.argv[1]), classify.__file__
