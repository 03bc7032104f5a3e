"""A torchrun that records what it got as attempt N, prints what the test wants and ends so.

RECORDS is the directory of its records: N.json for the last start as attempt N, `all` with the
arguments of every start. ENDS is a JSON list, one entry an attempt, the last for all later ones;
keys: program (a file beside those of the tests, run in this process), code (likewise, a line of
Python), stderr (a text), status.
"""

import json
import os
import sys

place, number = os.environ["RECORDS"], os.environ.get("SAFERUN_ATTEMPT", "0")
with open(f"{place}/{number}.tmp", "w", encoding="utf-8") as file:
    json.dump({"argv": sys.argv, "env": dict(os.environ), "pid": os.getpid()}, file)
os.rename(f"{place}/{number}.tmp", f"{place}/{number}.json")
with open(f"{place}/all", "a", encoding="utf-8") as file:
    file.write(json.dumps(sys.argv[1:]) + "\n")
ends = json.loads(os.environ.get("ENDS", "[]"))
end = ends[min(int(number), len(ends)) - 1] if ends else {}
exec(end.get("code", ""))
if "program" in end:
    with open(end["program"], encoding="utf-8") as file:
        exec(compile(file.read(), end["program"], "exec"))
sys.stderr.write(end.get("stderr", ""))
sys.stderr.flush()
sys.exit(end.get("status", 0))
