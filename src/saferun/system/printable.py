"""Pure: make other people's text safe to show, without characters that move the cursor.

This is the only place that decides it: control characters (C0, C1, DEL), marks that change the
direction of writing, line separators and lone surrogates are replaced by `?`.
"""

from __future__ import annotations


def printable(text: object, limit: int | None = None, *, kept: str = "") -> str:
    """Return a text in a form that can be shown.

    Args:
        text: any object; it is shown as its `str`.
        limit: most characters; None for no limit.
        kept: characters that may stay although they are not printable, such as a newline.
    """
    whole = str(text)[:limit]
    if whole.isprintable():
        return whole
    return "".join(c if c.isprintable() or c in kept else "?" for c in whole)


def shortened(text: str, limit: int) -> str:
    """Return a text of at most `limit` characters, with an ellipsis if it is cut."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
