"""Pure: text of others as people are shown it, without what moves the cursor.

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
