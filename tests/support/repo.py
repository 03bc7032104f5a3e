"""Where things lie in a checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
SITE = SRC / "saferun" / "inject" / "site"
RECORDS = ROOT / "tests" / "records"
