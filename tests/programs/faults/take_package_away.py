"""Moves the package at HERE away, once the start of this attempt is in the journal."""

import json
import os
import time
from pathlib import Path


def is_recorded():
    receipts = json.loads(os.environ["SAFERUN_INJECT"])["receipts"]
    return '"event": "started"' in (Path(receipts).parent / "events.jsonl").read_text(
        encoding="utf-8"
    )


if os.path.exists(os.environ["HERE"]):
    while not is_recorded():
        time.sleep(0.01)
    os.rename(os.environ["HERE"], os.environ["HERE"] + "-gone")
