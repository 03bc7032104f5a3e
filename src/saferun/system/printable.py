"""Pure: what people are shown: text of others without what moves the cursor, and durations.

The one place that decides it: control characters (C0, C1, DEL), marks that turn the direction of
writing, line separators and lone surrogates are replaced by `?`.
"""

from __future__ import annotations


def printable(text: object, limit: int | None = None, *, kept: str = "") -> str:
    """Return a text as it can be shown.

    Args:
        text: anything; an object is shown as its `str`.
        limit: of characters; None for no limit.
        kept: characters that may stay although they are not printable, such as a newline.
    """
    whole = str(text)[:limit]
    if whole.isprintable():
        return whole
    return "".join(c if c.isprintable() or c in kept else "?" for c in whole)


def shortened(text: str, limit: int) -> str:
    """Return a text of at most so many characters, with an ellipsis where it is cut."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def seconds(value_s: float) -> str:
    """Return a duration for people.

    >>> seconds(3.14), seconds(59.7), seconds(75), seconds(7300)
    ('3.1 s', '1 min 0 s', '1 min 15 s', '2 h 1 min')
    """
    if value_s < 59.5:
        return f"{value_s:.1f} s" if value_s < 9.95 else f"{value_s:.0f} s"
    minutes, rest = divmod(round(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
