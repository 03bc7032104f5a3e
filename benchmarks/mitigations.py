"""The mitigation table: what a failure costs under torchrun, torchrun with restarts, and saferun.

    python benchmarks/mitigations.py [KIND ...] [--way WAY ...] [--json FILE] [--list]
    python benchmarks/mitigations.py --gpu [--limit-s 290]

Each row of tests/mitigations/table.py (with --gpu: of gpu_table.py) is one small program that
fails for the real reason. It is run without its fault under torchrun, then with it in three ways,
one at a time, each in a fresh directory with an empty compile cache and no memory of earlier
mitigations. With --gpu, where a machine may be there for minutes only, all rows go one way before
the next, what saferun does first, and the rows that need little of the GPU run side by side, so
their seconds are those of a busy machine. Prints the table in Markdown.

`yes` means exit status 0 with the program's own last line from every rank, `stops` one attempt of
a failure that is not to be tried again. Seconds are those of the whole run, failed attempts and
waiting included. `+` is what saferun's run took beyond the one without the fault; what a mitigation
costs in every step is stated in knowledge/mitigations.yaml. Kinds that cannot be provoked follow,
each with the reason; they are not passed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("mitigations", "support")]
sys.path[:0] = [str(ROOT / "src")]

import gpu_table  # noqa: E402 - where they lie is known only now
import table  # noqa: E402 - where they lie is known only now
from table import Case  # noqa: E402 - where they lie is known only now
from ways import HEALTHY, LIMIT_S, SUPERVISED, WAYS, Outcome, go, missing  # noqa: E402 - where they lie is known only now

from saferun.planning import mitigation_catalog  # noqa: E402 - where they lie is known only now

HEAD = ("kind", *WAYS, "attempts", "mitigation", "+", "its cost in every step", "left alone")
BY_NEWS = (SUPERVISED, "torchrun", HEALTHY, "torchrun --max-restarts=3")
LANES = 12
GPU_LIMIT_S = 75.0  # of one run
LEAST_S = 15.0  # less is not worth a start


class Table:
    """What is known so far."""

    def __init__(self, ways: list[str], gpu: bool, limit_s: float, file: Path | None) -> None:
        self._ways, self._gpu, self._file = ways, gpu, file
        self._until = time.monotonic() + limit_s
        self._costs = mitigation_catalog.load()
        self._lock = threading.Lock()
        self._known: dict[str, dict[str, Outcome]] = {}
        self.wrong: list[str] = []

    def measure(self, case: Case, way: str) -> None:
        """Run a row in one way, if that is wanted and there is time, and keep what came out."""
        if way not in self._wanted(case) or missing(case):
            return
        outcome = self._run(case, way)
        if outcome is None:
            return
        with self._lock:
            self._known.setdefault(case.kind, {})[way] = outcome
            if self._file:
                self._file.write_text(json.dumps(self._facts(), indent=1))

    def show(self, case: Case) -> None:
        """Print a row."""
        known, reason = self._known.get(case.kind, {}), missing(case)
        cells = [case.kind, *(reported(case, way, known.get(way)) for way in WAYS)]
        if reason:
            cells[1] = f"not tried: {reason}"
        elif SUPERVISED in self._ways and not as_expected(case, known.get(SUPERVISED)):
            self.wrong.append(case.kind)
        print(row([*cells, *self._conclusion(case, known)]), flush=True)

    def _facts(self) -> dict[str, dict[str, dict[str, object]]]:
        return {
            kind: {way: facts(outcome) for way, outcome in known.items()}
            for kind, known in self._known.items()
        }

    def _wanted(self, case: Case) -> list[str]:
        """A GPU is there for minutes: what stops is not tried in the ways that are no news."""
        return [way for way in self._ways if not (self._gpu and case.stops) or way == SUPERVISED]

    def _run(self, case: Case, way: str) -> Outcome | None:
        left_s = self._until - time.monotonic()
        if left_s < LEAST_S:
            return None
        with tempfile.TemporaryDirectory(prefix="mitigations-") as folder:
            limit_s = min(GPU_LIMIT_S if self._gpu else LIMIT_S, left_s)
            return go(case, way, Path(folder), limit_s)

    def _conclusion(self, case: Case, known: dict[str, Outcome]) -> list[str]:
        ours, healthy = known.get(SUPERVISED), known.get(HEALTHY)
        if ours is None:
            return [""] * 4 + [case.alone]
        attempts, mitigation = str(ours.attempts), ", ".join(ours.mitigations)
        if not case.stops:
            mitigation = mitigation or "another attempt"
        if set(ours.kinds) != {case.kind} or ours.mitigations != case.mitigations:
            mitigation += f" (seen as {', '.join(ours.kinds) or 'no failure'})"
        more = ""
        if ours.finished and healthy and healthy.finished:
            more = f"{ours.seconds - healthy.seconds:+.1f} s"
        costs = [self._costs[name].cost for name in ours.mitigations] or ["none"]
        cost = "; ".join(dict.fromkeys(costs)) if ours.finished else ""
        return [attempts, mitigation, more, cost, case.alone]


def as_expected(case: Case, outcome: Outcome | None) -> bool:
    """Return whether saferun's run came out as the row says."""
    if (
        outcome is None
        or set(outcome.kinds) != {case.kind}
        or outcome.mitigations != case.mitigations
    ):
        return False
    return outcome.attempts == 1 if case.stops else outcome.finished


def reported(case: Case, way: str, outcome: Outcome | None) -> str:
    """Return "yes, 12.3 s", "no (1), …" with the exit status, "stops (1), …"."""
    if outcome is None:
        return "not run"
    if outcome.finished:
        return f"yes, {outcome.seconds:.1f} s"
    how = "no" if way != SUPERVISED or not case.stops or outcome.attempts != 1 else "stops"
    how = "hangs" if outcome.status is None else f"{how} ({outcome.status})"
    return f"{how}, {outcome.seconds:.1f} s"


def facts(outcome: Outcome) -> dict[str, object]:
    """Return an outcome for the JSON file, with the ends of its streams."""
    return {**outcome._asdict(), "out": outcome.out[-500:], "err": outcome.err[-3000:]}


def by_row(known: Table, cases: list[Case]) -> None:
    """Run and show one row after the other."""
    for case in cases:
        for way in WAYS:
            known.measure(case, way)
        known.show(case)


def by_way(known: Table, cases: list[Case]) -> None:
    """Run all rows in one way, then in the next; show them at the end."""
    light, large, whole = (
        [case for case in cases if case in size]
        for size in (gpu_table.LIGHT, gpu_table.LARGE, gpu_table.WHOLE)
    )
    for way in BY_NEWS:
        with ThreadPoolExecutor(LANES) as lanes:
            waiting = [lanes.submit(known.measure, case, way) for case in light]
            for case in large:
                known.measure(case, way)
            for one in waiting:
                one.result()
        for case in whole:
            known.measure(case, way)
    for case in cases:
        known.show(case)


def row(cells: list[str] | tuple[str, ...]) -> str:
    """Return one line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="only these rows")
    parser.add_argument("--way", action="append", choices=WAYS, help="only so")
    parser.add_argument("--gpu", action="store_true", help="the rows that need a GPU")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="for all rows together")
    parser.add_argument("--json", type=Path, metavar="FILE", help="what came out, in full")
    parser.add_argument("--list", action="store_true", help="print the kinds and run nothing")
    return parser


def main() -> int:
    """Run the rows that were asked for; return 1 if saferun did not do with one what it should."""
    parser = arguments()
    options = parser.parse_args()
    cases = gpu_table.CASES if options.gpu else table.CASES
    if unknown := set(options.kinds) - {case.kind for case in cases}:
        parser.error(f"no row: {', '.join(sorted(unknown))}")
    cases = [case for case in cases if not options.kinds or case.kind in options.kinds]
    if options.list:
        print("\n".join(case.kind for case in cases))
        return 0
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    print(row(HEAD), row(["---"] * len(HEAD)), sep="\n", flush=True)
    known = Table(options.way or list(WAYS), options.gpu, options.limit_s, options.json)
    (by_way if options.gpu else by_row)(known, cases)
    if not options.kinds:
        print("\nNot provoked, so not passed:\n")
        print("\n".join(f"- {kind}: {reason}" for kind, reason in table.NOT_HERE.items()))
    if known.wrong:
        print(f"\nNot as expected: {', '.join(known.wrong)}")
    return bool(known.wrong)


if __name__ == "__main__":
    sys.exit(main())
