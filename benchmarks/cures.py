"""The cure table: what a failure costs under torchrun, torchrun with restarts, and saferun.

    python benchmarks/cures.py [KIND ...] [--way WAY ...] [--list]

Each row of tests/cures/table.py is one small program that fails for the real reason; it is run
three ways, one at a time, each in a fresh directory with an empty compile cache and no memory of
earlier cures. Prints the table in Markdown, one row as soon as it is known. `finished` means exit
status 0 with the program's own last line from every rank. Seconds are those of the whole run,
failed attempts and waiting included. Kinds that cannot be provoked without a GPU or a second
machine follow, each with the reason; they are not passed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "cures"))

from table import CASES, NOT_HERE, Case  # noqa: E402 - where they lie is known only now
from ways import WAYS, Outcome, go  # noqa: E402

HEAD = ("kind", *WAYS, "attempts", "cure", "left alone")


def told(outcome: Outcome) -> str:
    """Return "yes, 12.3 s", or "no (1), …" with the exit status."""
    if outcome.finished:
        return f"yes, {outcome.seconds:.1f} s"
    how = "hangs" if outcome.status is None else f"no ({outcome.status})"
    return f"{how}, {outcome.seconds:.1f} s"


def measured(case: Case, ways: list[str]) -> list[str]:
    """Run a row; return its cells."""
    if case.needs and not case.needs():
        reason = f"not tried: {case.needs.__doc__}"
        return [case.kind, *[reason] * len(WAYS), "", "", case.alone]
    cells, attempts, cure = [], "", ""
    for way in WAYS:
        if way not in ways:
            cells.append("not run")
            continue
        with tempfile.TemporaryDirectory(prefix="cures-") as folder:
            outcome = go(case, way, Path(folder))
        cells.append(told(outcome))
        if way == "saferun":
            attempts = str(outcome.attempts)
            cure = ", ".join(outcome.cures) or "another attempt"
            if set(outcome.kinds) != {case.kind} or outcome.cures != case.cures:
                cure += f" (seen as {', '.join(outcome.kinds) or 'no failure'})"
    return [case.kind, *cells, attempts, cure, case.alone]


def row(cells: list[str] | tuple[str, ...]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Run the rows that were asked for; return 1 if saferun did not finish one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="only these rows")
    parser.add_argument("--way", action="append", choices=WAYS, help="only so")
    parser.add_argument("--list", action="store_true", help="print the kinds and run nothing")
    options = parser.parse_args()
    if unknown := set(options.kinds) - {case.kind for case in CASES}:
        parser.error(f"no row: {', '.join(sorted(unknown))}")
    cases = [case for case in CASES if not options.kinds or case.kind in options.kinds]
    if options.list:
        print("\n".join(case.kind for case in cases))
        return 0
    os.environ.setdefault("PYTHONPATH", str(ROOT / "src"))
    print(row(HEAD), row(["---"] * len(HEAD)), sep="\n", flush=True)
    failed = 0
    for case in cases:
        cells = measured(case, options.way or list(WAYS))
        failed += cells[len(WAYS)].startswith(("no (", "hangs"))
        print(row(cells), flush=True)
    if not options.kinds:
        print("\nNot provoked here, so not passed:\n")
        print("\n".join(f"- {kind}: {reason}" for kind, reason in NOT_HERE.items()))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
