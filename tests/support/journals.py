"""What the tests of journals write and read."""

from dataclasses import make_dataclass
from typing import Any

from saferun.journal import event_types
from saferun.journal.events import read_raw as read_events
from saferun.journal.writer import Journal
from saferun.system.redact import Masker

SECRET = "s3cr3t-value-0123"
MASKER = Masker({"MY_TOKEN": SECRET}, [])
PLAN = {
    "schema": 1,
    "command": ["torchrun", "t.py", "--hf-token", "abc"],
    "env": {"X_API_KEY": {"value": "short", "origin": "profile", "why": f"for {SECRET}"}},
    "script": "t.py",
}


def events(journal: Journal) -> list[dict]:
    return read_events(f"{journal.path}/events.jsonl")


def names(journal: Journal) -> list[str]:
    return [event["event"] for event in events(journal)]


def noted(name: str, /, **facts: object) -> Any:
    """Return an event that no run writes."""
    kind = make_dataclass("Noted", facts)
    event_types.NAMES[kind] = name
    return kind(**facts)


def use(journal: Journal) -> None:
    """Do everything once."""
    journal.plan(PLAN)
    journal.event(noted("start"))
    journal.tails(1, b"out", b"err")
    journal.sync()
    journal.receipts()
