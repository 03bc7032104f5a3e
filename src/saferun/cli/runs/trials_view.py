"""The trials of a run as text, JSON and CSV. Pure."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from saferun.cli.runs.text_table import aligned
from saferun.journal.trials import (
    Region,
    Trial,
    by_cause,
    ended_its_process,
    number_of,
    processes,
    regions,
)
from saferun.system.printable import printable

_STATES = (("completed", "COMPLETE"), ("pruned", "PRUNED"), ("failed", "FAIL"))
_SHOWN = 10  # most regions in the text
_ENDED = 5  # most trials shown that ended their process
_HEAD = ("PARAMETER", "REGION", "FAILED", "OF", "SHARE", "CAUSES")


def as_text(trials: Sequence[Trial], replaced: Mapping[str, int]) -> list[str]:
    """Return lines about a run's trials; [] if it has none.

    Args:
        trials: the run's trials.
        replaced: number of replacements of the run's process, by reason.
    """
    if not trials:
        return []
    lines = ["", number_of(trials)]
    for word, state in _STATES:
        counts = by_cause(trials, state)
        total = sum(count for _, count in counts)
        lines += [f"  {word:<10}{total}{_causes(counts)}"] if total else []
    if replaced:
        reasons = tuple(sorted(replaced.items(), key=lambda item: -item[1]))
        count = processes(sum(replaced.values()))
        lines.append(f"  {'replaced':<10}{count}{_causes(reasons)}")
    for trial in [trial for trial in trials if ended_its_process(trial)][:_ENDED]:
        cause = printable(trial.cause)
        lines.append(f"  trial {trial.number} ended its process: {cause}; {parameters(trial)}")
    return lines + _table(regions(trials)[:_SHOWN])


def parameters(trial: Trial) -> str:
    """Return a trial's parameters as "lr=0.1, layer=conv"."""
    return ", ".join(f"{printable(name)}={printable(v)}" for name, v in trial.params.items())


def as_json(trials: Sequence[Trial], replaced: Mapping[str, int]) -> dict[str, Any]:
    """Return the trials for programs, with all trials and regions."""
    return {
        **{word: dict(by_cause(trials, state)) for word, state in _STATES},
        "replaced": dict(replaced),
        "regions": [{**r._asdict(), "causes": dict(r.causes)} for r in regions(trials)],
        "trials": [{**trial._asdict(), "values": list(trial.values)} for trial in trials],
    }


def as_csv(trials: Sequence[Trial]) -> str:
    """Return CSV with one row a trial and a column `param.NAME` for each parameter."""
    names = sorted({name for trial in trials for name in trial.params})
    fixed = ("study", "number", "state", "cause", "values", "seconds", "worker", "attempt")
    written = io.StringIO()
    rows = csv.writer(written, lineterminator="\n")
    rows.writerow([*fixed, *(f"param.{name}" for name in names)])
    for trial in trials:
        facts = {**trial._asdict(), "values": " ".join(map(repr, trial.values))}
        row = [facts[name] for name in fixed] + [trial.params.get(name, "") for name in names]
        rows.writerow([_cell(value) for value in row])
    return written.getvalue()


def _cell(value: object) -> object:
    """Return a cell that a spreadsheet does not read as a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return "" if value is None else value


def _causes(counts: Sequence[tuple[str, int]]) -> str:
    named = [f"{count} {printable(cause)}" for cause, count in counts if cause]
    return f": {', '.join(named)}" if named else ""


def _table(found: Sequence[Region]) -> list[str]:
    rows = [_HEAD]
    for region in found:
        place = (
            printable(region.value) if region.low is None else f"{region.low:g} to {region.high:g}"
        )
        share = f"{100 * region.failed / region.trials:.0f} %"
        causes = ", ".join(f"{count} {printable(cause)}" for cause, count in region.causes)
        count = (str(region.failed), str(region.trials))
        rows.append((printable(region.param), place, *count, share, causes))
    return [f"  {line}" for line in aligned(rows)] if found else []
