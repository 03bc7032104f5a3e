"""Where things lie in a checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
SITE = SRC / "saferun" / "inject" / "site"
RECORDS = ROOT / "tests" / "records"
PROGRAMS = ROOT / "tests" / "programs"


def source(name: str) -> str:
    """Return the text of a program that a test runs: tests/programs/NAME.py."""
    return (PROGRAMS / f"{name}.py").read_text()
