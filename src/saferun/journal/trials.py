"""The finished trials of a run, read from the records of its processes, and their summary.

The hook `optuna` writes them (inject/hooks/optuna/state.py), so they are known even if the study's
storage is gone. Lines that are no trial are skipped.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from saferun.base import files, untrusted
from saferun.journal import events
from saferun.journal.event_types import Recycled

FILE = "trials.jsonl"
MAX_BYTES = 65 << 20  # the hook stops at 64 MiB
_BINS = 4  # regions of a parameter with many numbers
_FEW = 8  # up to so many numbers, each one is a region
_MAX_VALUES = 20  # most regions of a parameter with words
_NUMBER = re.compile(r"^\d+ ")
_LEAST = 2  # failed trials that make a region worth showing


class Trial(NamedTuple):
    """One finished trial."""

    study: str
    number: int
    state: str  # COMPLETE, PRUNED, FAIL
    cause: str  # why it was pruned or failed
    params: Mapping[str, Any]  # open: defined by the user's search
    values: tuple[float, ...]
    seconds: float | None
    worker: str
    attempt: int | None  # the attempt in which it ran
    at: float = 0.0  # when it finished, in seconds since the epoch; 0 if unknown
    again: bool = False  # its process ended or was replaced in it, so it is run again
    direction: str = ""  # minimize or maximize; "" if the study has several objectives


class Region(NamedTuple):
    """A part of one parameter's values, and the results of its trials."""

    param: str
    low: float | None  # the bounds of a region of numbers
    high: float | None
    value: str  # the word, in a region of words
    trials: int
    failed: int  # includes trials pruned for an error
    causes: tuple[tuple[str, int], ...]


def read(run_path: str) -> tuple[Trial, ...]:
    """Return the trials of a run, in the order in which each worker finished them."""
    found: list[Trial] = []
    try:
        workers = sorted(name for name in os.listdir(run_path) if name.startswith("worker-"))
    except OSError:
        return ()
    for part in ("", *workers):
        directory = os.path.join(run_path, part, "state")
        content = files.read_private(os.path.join(directory, FILE), MAX_BYTES) or b""
        lines = untrusted.objects(content)
        found += [
            events.record(Trial, raw) for raw in lines if untrusted.is_count(raw.get("number"))
        ]
    return tuple(found)


def replaced(run_path: str) -> dict[str, int]:
    """Return how often a process of the run was replaced, by reason without numbers."""
    asked = [event.facts for event in events.read(run_path)]
    whys = [facts.why for facts in asked if isinstance(facts, Recycled)]
    return dict(Counter(_NUMBER.sub("", why.partition(" in trial ")[0]) for why in whys))


def headline(trials: Sequence[Trial], crashed: int, replaced: int) -> str:
    """Return a search in one line: "60 trials, best 1.0018; 1 process crashed, 4 replaced".

    Args:
        trials: the run's trials.
        crashed: number of processes that failed.
        replaced: number of processes that asked to be replaced.
    """
    line = number_of(trials)
    if found := best(trials):
        line += f", best {found.values[0]:.6g}"
    ends = [f"{processes(crashed)} crashed"] if crashed else []
    if replaced:
        ends.append(f"{replaced} replaced" if crashed else f"{processes(replaced)} replaced")
    return f"{line}; {', '.join(ends)}" if ends else line


def number_of(trials: Sequence[Trial]) -> str:
    """Return text such as "60 trials, 2 of them run twice": a repeated trial counts once."""
    last: dict[str, int] = {}
    for trial in trials:
        if not trial.again:
            last[trial.study] = max(trial.number, last.get(trial.study, 0))
    cut_off = [trial for trial in trials if trial.again]
    twice = sum(trial.number < last.get(trial.study, 0) for trial in cut_off)
    text = counted(len(trials) - len(cut_off), "trial")
    text += f", {twice} of them run twice" if twice else ""
    left = len(cut_off) - twice
    return f"{text}, and {left} to be run again" if left else text


def best(trials: Sequence[Trial]) -> Trial | None:
    """Return the best trial of a search in one study with one objective; None for any other."""
    directions = {trial.direction for trial in trials}
    one_study = len({trial.study for trial in trials}) == 1 and "" not in directions
    done = [one for one in trials if one.state == "COMPLETE" and len(one.values) == 1]
    sign = -1 if directions == {"maximize"} else 1
    ranked = [one for one in done if not one.again and one_study]
    return min(ranked, key=lambda one: sign * one.values[0], default=None)


def counted(number: int, noun: str) -> str:
    """Return "1 trial", "2 trials"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def processes(number: int) -> str:
    """Return "1 process", "2 processes"."""
    return f"{number} process{'' if number == 1 else 'es'}"


def by_cause(trials: Iterable[Trial], state: str) -> tuple[tuple[str, int], ...]:
    """Return the number of trials that ended in a state, by cause, the most frequent first."""
    return tuple(Counter(trial.cause for trial in trials if trial.state == state).most_common())


def ran_in(trial: Trial, number: int, worker: int | None) -> bool:
    """Return whether a trial ran in an attempt.

    Args:
        trial: a trial of the run.
        number: the attempt's number.
        worker: the attempt's worker; None if the run has one process.
    """
    return trial.attempt == number and (worker is None or trial.worker == str(worker))


def ended_its_process(trial: Trial) -> bool:
    """Return whether a trial's process died in it, or was replaced because of it."""
    return trial.again or trial.cause.startswith("SIG")


def is_bad(trial: Trial) -> bool:
    """Return whether an error ended a trial; a pruner's decision is no error."""
    return trial.state == "FAIL" or (trial.state == "PRUNED" and trial.cause != "pruner")


def regions(trials: Sequence[Trial]) -> tuple[Region, ...]:
    """Return the parts of the parameters' values in which trials fail more often than elsewhere.

    The values of a parameter with more than eight numbers are divided into four parts with equally
    many trials.

    Returns:
        The regions with at least two failed trials, the largest share of failures first.
    """
    bad = sum(map(is_bad, trials))
    usual = bad / len(trials) if trials else 0.0
    found = []
    for param in sorted({name for trial in trials for name in trial.params}):
        having = [trial for trial in trials if param in trial.params]
        for region in _cut(param, having):
            if region.failed >= _LEAST and region.failed / region.trials > usual:
                found.append(region)
    return tuple(sorted(found, key=lambda r: (-r.failed / r.trials, -r.failed, r.param)))


def _cut(param: str, trials: Sequence[Trial]) -> Iterator[Region]:
    numbers = [trial for trial in trials if untrusted.is_number(trial.params[param])]
    if len(numbers) < len(trials):
        kept = Counter(str(trial.params[param]) for trial in trials).most_common(_MAX_VALUES)
        for value, _ in kept:
            mine = [trial for trial in trials if str(trial.params[param]) == value]
            yield _region(param, mine)._replace(value=value)
        return
    numbers.sort(key=lambda trial: trial.params[param])
    few = len({trial.params[param] for trial in numbers}) <= _FEW
    size = 1 if few else -(-len(numbers) // _BINS)
    start = 0
    while start < len(numbers):
        end = start + size
        # Equal values stay together.
        while end < len(numbers) and numbers[end].params[param] == numbers[end - 1].params[param]:
            end += 1
        part = numbers[start:end]
        low, high = part[0].params[param], part[-1].params[param]
        yield _region(param, part)._replace(low=low, high=high)
        start = end


def _region(param: str, trials: Sequence[Trial]) -> Region:
    bad = [trial for trial in trials if is_bad(trial)]
    causes = tuple(Counter(trial.cause for trial in bad).most_common())
    return Region(param, None, None, "", len(trials), len(bad), causes)
