"""Moves the package at HERE away, once the supervisor waits for what the job does."""

import json
import os
import time
from pathlib import Path


def waits():
    """Return whether the start of this attempt is in the journal and saferun waits again."""
    receipts = json.loads(os.environ["SAFERUN_INJECT"])["receipts"]
    events = (Path(receipts).parent / "events.jsonl").read_text()
    started = [line for line in events.splitlines() if '"event": "started"' in line]
    if not started:
        return False
    keeper = Path(f"/proc/{json.loads(started[-1])['keeper']}/status").read_text()
    supervisor = keeper.partition("PPid:")[2].split()[0]
    # Where it sleeps; "0" while it runs, and always on a kernel that does not tell.
    place = Path(f"/proc/{supervisor}/wchan").read_text()
    sleeps = "State:\tS" in Path(f"/proc/{supervisor}/status").read_text()
    return sleeps and ("poll" in place or place == "0")


if os.path.exists(os.environ["HERE"]):
    while not waits():
        time.sleep(0.01)
    os.rename(os.environ["HERE"], os.environ["HERE"] + "-gone")
