"""One test for a table of cases: all are tried, and all that fail are reported together."""

import itertools
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")


def check_cases(
    cases: Iterable[tuple[Any, ...]] | Mapping[str, tuple[Any, ...]], check: Callable[..., object]
) -> None:
    """Call `check(*case)` for each case; fail once, with every case that failed and why.

    Args:
        cases: tuples of arguments, or {name: arguments} where a name says more than the values.
        check: makes assertions about one case; what it returns is ignored.

    Raises:
        pytest.fail.Exception: at least one case failed.
        AssertionError: the table is empty.
    """
    named = cases.items() if isinstance(cases, Mapping) else ((repr(c), c) for c in cases)
    count, failures = 0, []
    for name, case in named:
        count += 1
        try:
            check(*case)
        except (Exception, pytest.fail.Exception) as error:
            frames = traceback.extract_tb(error.__traceback__)
            where = f"line {frames[1].lineno}" if len(frames) > 1 else "the call"
            why = "".join(traceback.format_exception_only(error)).rstrip()
            failures.append(f"{name[:500]}\n    {where}: " + why.replace("\n", "\n    "))
    assert count, "the table is empty"
    if failures:
        pytest.fail(f"{len(failures)} of {count} cases:\n\n" + "\n\n".join(failures), pytrace=False)


def few(table: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the values of a table as parameters; all but those named are slow.

    Args:
        table: {name: value}.
        names: of those that `make unit` runs, too.
    """
    assert set(names) <= set(table)
    return [
        pytest.param(value, id=name, marks=() if name in names else pytest.mark.slow)
        for name, value in table.items()
    ]


def spread(rows: Mapping[str, tuple[Any, ...]], ways: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return cases in which each row comes in one of the ways, its last argument, by turns."""
    turns = zip(rows.items(), itertools.cycle(ways))
    return {f"{name}, {way}": (*arguments, way) for (name, arguments), way in turns}


def slow(*cases: Any) -> list[Any]:
    """Return cases as parameters that only `make slow` runs; a tuple holds several arguments.

    Raises:
        TypeError: it stands over a test as a decorator, where it would take the test away.
    """
    for name in (getattr(case, "__name__", "") for case in cases):
        if name.lower().startswith("test"):
            raise TypeError(f"slow() makes parameters: mark {name} with @pytest.mark.slow")
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def with_limits(
    action: Callable[[float], Result], accept: Callable[[Result], bool], *, first_s: float = 1
) -> Result:
    """Return the first result that is as it should be, of limits that grow 64-fold.

    For what must hang until a limit while something else has to happen before it: how long that
    takes says nothing but how loaded the machine is.
    """
    for factor in (1, 8, 64):
        result = action(first_s * factor)
        if accept(result):
            return result
    raise AssertionError(result)
