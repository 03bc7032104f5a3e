"""Pure: durations as text for people."""

from __future__ import annotations


def seconds(value_s: float) -> str:
    """Return a duration for people.

    >>> seconds(3.14), seconds(20), seconds(59.7), seconds(75), seconds(600), seconds(7300)
    ('3.1 s', '20 s', '1 min', '1 min 15 s', '10 min', '2 h 1 min')
    """
    if value_s < 59.5:
        return f"{round(value_s, 1 if value_s < 9.95 else None):g} s"
    minutes, rest = divmod(round(value_s), 60)
    hours, left = divmod(minutes, 60)
    parts = [(hours, "h"), (left, "min"), (0 if hours else rest, "s")]
    return " ".join(f"{value} {unit}" for value, unit in parts if value)
