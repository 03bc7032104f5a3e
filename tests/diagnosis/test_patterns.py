"""No pattern of the diagnosis takes more than linear time, whatever a log holds."""

import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest
from backtracking import runs_away
from cases import slow
from job_logs import KNOWN

from saferun import diagnosis

# What logs may be full of, and what the patterns look for, cut off again and again.
UNITS = [
    "a", "A", "a.", "1", " ", "/a", "(", "'", "\t", "[", "-", "_", "=", ":", "\x1b[",
    "Error(", "Error: ", "[rank1]: ", "1: ", "ErrorErrorError", "a: ", "a-", "a-1", "1.1",
    "killed ", "signal ", "port: ", "step 1 ", "[1:1:1:1", "exit code ", "1/1 [", "loss: ",
    "OpType=A", "status=1", "required ", "required 1", "2024-01-01 00:00:00", "A_", "epoch 1",
    "rank 1 and ", "Tried to allocate ", "0x", "deadbeef", "Caught A in ", "epoch    ", "loss   ",
    "container rank 1 status failed cmd [", "1.1 GiB", "\x1b]0;", "E0101 00:00:00.0 1 ", "raise A",
    "Jan 1 00:00:00 host ", '{"log": "', "multiprocessing/resource_sharer.py\", line 1", "1\n",
    "a=1 ", 'a="a" ', "\\n", 'File "/a", line 1, in a', "a_download", " rank 1 nranks 1",
    "1 1 a a 1 1.1 ",
]  # fmt: skip


def patterns_in(value: object) -> Iterator[re.Pattern[str]]:
    """Yield the patterns of a value; those over bytes as the same over characters."""
    if isinstance(value, re.Pattern):
        is_text = isinstance(value.pattern, str)
        flags = value.flags & ~re.UNICODE if is_text else value.flags | re.ASCII
        source = value.pattern if is_text else value.pattern.decode("latin-1")
        yield re.compile(source, flags)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from patterns_in(item)
    elif isinstance(value, dict):
        yield from patterns_in(list(value.values()))


def all_patterns() -> dict[str, re.Pattern[str]]:
    """Return every pattern of the room's modules and of the knowledge, by where it stands."""
    found = {}
    for module in pkgutil.walk_packages(diagnosis.__path__, "saferun.diagnosis."):
        for name, value in vars(importlib.import_module(module.name)).items():
            for number, pattern in enumerate(patterns_in(value)):
                found[f"{module.name}.{name} {number}"] = pattern
    for kind in KNOWN.kinds.values():
        if kind.numbers:
            found[f"numbers of {kind.name}"] = re.compile(kind.numbers)
    for number, row in enumerate(KNOWN.outside):
        found[f"row {number} of outside_faults.yaml, type"] = re.compile(row.type)
        found[f"row {number} of outside_faults.yaml, says"] = re.compile(row.says, re.I)
    return found


@pytest.mark.parametrize(
    "units",
    [UNITS[:1], pytest.param(UNITS, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["the plainest one", "all"],
)
def test_no_pattern_backtracks_without_bound(units):
    patterns = all_patterns()
    assert len(patterns) > 60
    found = [
        (name, unit) for name, pat in patterns.items() for unit in units if runs_away(pat, unit)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("pattern", "unit"), [(r"(a|a)*$", "a"), *slow((r"\s*x\s*$", " "), (r"x.*y", "x"))]
)
def test_a_pattern_that_backtracks_is_found_by_this_check_and_a_bounded_one_passes(pattern, unit):
    assert runs_away(re.compile(pattern), unit)
    assert not runs_away(re.compile(r"\s{1,20}x$"), unit)
