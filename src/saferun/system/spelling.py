"""Pure: the known word that a misspelt one is nearest to."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is most like another; "" where none is.

    Args:
        word: as it was written.
        known: the words that there are.
        cutoff: from 0, where every word will do, to 1, where only the same one does
            (`difflib.get_close_matches`).
    """
    from difflib import get_close_matches  # 3 ms, which only a mistake needs

    return next(iter(get_close_matches(word, known, 1, cutoff)), "")
