"""Run the tests that depend on Python and torch in other environments; print a row for each.

    tools/versions.py ENVIRONMENT...

Each ENVIRONMENT is a virtual environment with torch, click, pyyaml, filelock, rich, jinja2, numpy,
optuna, pytest, pytest-timeout, pytest-xdist and hypothesis; saferun is installed into it from this
checkout. The tests are those of the hooks in ranks, of torchrun's grammar against the installed
torch, of the keeper, of diagnosis, and of whole runs under a real torchrun.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("inject", "planning", "keeper", "journal", "supervise", "faults/test_attempt.py")
VERSIONS = "import platform, torch; print(platform.python_version(), '|', torch.__version__)"


def row(environment: Path) -> str:
    """Return the table's row of one environment."""
    python = environment / "bin" / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", ROOT]
    subprocess.run(install, check=True)
    versions = subprocess.check_output([python, "-c", VERSIONS], text=True)
    tests = [f"tests/{room}" for room in ROOMS]
    options = ["-q", "-n", "2", "-m", "not slow", "-p", "no:cacheprovider", "--tb=short"]
    log = environment / "versions.log"
    with log.open("w") as file:
        command = [python, "-m", "pytest", *options, *tests]
        subprocess.run(command, cwd=ROOT, stdout=file)
    last = log.read_text().splitlines()[-1]
    counts = [f"{n} {what}" for n, what in re.findall(r"(\d+) (failed|passed|skipped|error)", last)]
    return f"| {versions.strip()} | {', '.join(counts) or last} |"


def main(environments: list[str]) -> int:
    """Print the table."""
    print("| Python | torch | tests |\n| --- | --- | --- |", flush=True)
    for environment in environments:
        print(row(Path(environment).absolute()), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
