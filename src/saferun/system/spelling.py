"""Pure: find the known word that is nearest to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known word that is nearest to another; "" if none is near.

    Args:
        word: the word as written.
        known: the known words.
        cutoff: from 0 (every word is near) to 1 (only the same word is), as for
            `difflib.get_close_matches`.
    """
    from difflib import get_close_matches  # 3 ms, which only a mistake needs

    return next(iter(get_close_matches(word, known, 1, cutoff)), "")
