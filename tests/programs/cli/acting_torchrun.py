"""A torchrun that does in each attempt what ACTS says of it: write a receipt, say, wait, end."""

import json
import os
import sys
from pathlib import Path

act = json.loads(os.environ["ACTS"])[int(os.environ["SAFERUN_ATTEMPT"]) - 1]
if "receipt" in act:
    place = json.loads(os.environ["SAFERUN_INJECT"])["receipts"]
    with open(place + "/a1-r0-rank3-pid77.jsonl", "w", encoding="utf-8") as file:
        file.write(json.dumps(act["receipt"]) + "\n")
sys.stderr.write(act.get("says", ""))
sys.stderr.flush()
if "wait" in act:
    os.mkfifo(act["wait"])
    Path(act["wait"]).read_bytes()
sys.exit(act.get("status", 0))
