"""Pure: the kinds of failures that nearly fit a log, and what speaks against each.

They are a partial answer if nothing fits, and help to debug a new sign that does not match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from saferun.base.phrases import says
from saferun.diagnosis.deciding import matches
from saferun.diagnosis.deciding.candidate import Candidate
from saferun.diagnosis.deciding.candidates import Collected
from saferun.diagnosis.deciding.root_line import is_of_failure
from saferun.diagnosis.diagnosis import Near
from saferun.diagnosis.signatures import Knowledge, Needle, Sign

MOST = 2  # most kinds shown to people if nothing fits
_WORDS_SHOWN = 4
_WORD = re.compile(r"[a-z][a-z0-9]{2,40}")
_COMMON = frozenset(
    ("and", "are", "can", "error", "for", "from", "has", "its", "not", "that", "the", "this",
     "was", "with", "your")
)  # fmt: skip
_SHARED = 0.34  # least part of a phrase's words, weighed by rarity, that a line must share
_REACH = 1000  # most lines from the end of the log that are searched
_LAST_LINES = 5  # number of last lines that are compared without such a word, too
_LINES = 60  # number of last lines with a word of failure, compared with all phrases


def closest(collected: Collected, knowledge: Knowledge) -> tuple[Near, ...]:
    """Return the nearest kinds, the nearest one first: at most MOST, each once.

    Candidates with a low weight come first, then signs with an unmet condition, then phrases that
    share most of their words with a line. The result may be empty.
    """
    kinds: dict[str, Near] = {}
    for near in _in_order(collected, knowledge):
        kinds.setdefault(near.kind, near)
        if len(kinds) == MOST:
            break
    return tuple(kinds.values())


def _in_order(collected: Collected, knowledge: Knowledge) -> Iterator[Near]:
    weighed = sorted(collected.found, key=lambda item: -item.weight)
    for item in weighed:
        if item.kind != "unknown":
            why = "; ".join(item.why) or "it weighs little"
            yield Near(item.kind, item.number, "", why)
    yield from sorted(misses(collected, knowledge), key=lambda near: -len(near.phrase))
    yield from _alike(collected, knowledge)


def misses(collected: Collected, knowledge: Knowledge) -> Iterator[Near]:
    """Yield the places that contain a sign's phrase although the sign does not count.

    There is one for each kind and line, the last lines first.

    Args:
        collected: the candidates of the log.
        knowledge: the signs.
    """
    counted = {item.position: item for item in collected.found}
    found = [
        Near(sign.kind, text.lines[row].number, shown, f"`{shown}` is there, but {why}")
        for sign in knowledge.signs
        for needle in sign.says
        for text in collected.texts
        for row in text.rows_with(max(needle, key=len))
        if says(needle, text.statement(row))
        and (shown := _shown(needle))
        and (why := _against(sign, text, row, counted.get((text.source.order, row))))
    ]
    found += [
        Near(m.kind, m.number, "", f"{''.join(m.why)}, in a log this long it does not count")
        for m in collected.left_out
    ]
    once = {(near.kind, near.line): near for near in reversed(found)}
    yield from sorted(once.values(), key=lambda near: -near.line)


def _against(sign: Sign, text: matches.Text, row: int, counted: Candidate | None) -> str:
    """Return why a sign does not count at a place with its phrase; "" if it counts."""
    name = matches.against(sign, text, row)
    if name:
        return _CONDITIONS[name].format(_any(getattr(sign, name, ())))
    if counted is not None and counted.sign is not None and counted.sign.kind != sign.kind:
        return f"the sign of {counted.sign.kind}, which stands above its own, fits as well"
    return ""


_CONDITIONS = {  # conditions of a sign, by the names that matches.against returns
    "line": "it counts only outside an exception",
    "frame": "in a frame of a traceback",
    "information": "as information, not as a failure",
    "last": "not in the last lines of the log",
    "innermost": "its last frame has not {}",
    "own": "its traceback and message have not {}",
    "not_own": "its traceback or message has {}",
    "not_above": "above it stands {}",
    "doing": "the lines around it do not show what it belongs to",
    "near": "the lines around it have not {}",
    "not_near": "the lines around it have {}",
    "anywhere": "nowhere {}",
    "not_anywhere": "in the log is {}, too",
}


def _any(words: object) -> str:
    if not isinstance(words, tuple) or not words:
        return ""
    shown = " or ".join(f"`{word}`" for word in words[:_WORDS_SHOWN])
    return shown if len(words) <= _WORDS_SHOWN else f"{shown} or another of {len(words)}"


def _alike(collected: Collected, knowledge: Knowledge) -> Iterator[Near]:
    """Yield the kinds with a phrase that shares most of its words with a line, nearest first."""
    phrases = [
        (sign.kind, needle, frozenset(_words(" ".join(needle))))
        for sign in knowledge.signs
        for needle in sign.says
    ]
    holding: dict[str, list[int]] = {}  # word -> phrases that contain it
    for at, (_, _, words) in enumerate(phrases):
        for word in words:
            holding.setdefault(word, []).append(at)
    rare = {word: math.log(1 + len(phrases) / len(at)) for word, at in holding.items()}
    best: list[tuple[float, int, str, Needle, frozenset[str]]] = []
    for row in _telling_rows(collected.log):
        words = _words(collected.log.lower[row]) & rare.keys()
        # Of equals the sign that stands furthest below comes first: it is the most general.
        for at in sorted({at for word in words for at in holding[word]}, reverse=True):
            kind, needle, wanted = phrases[at]
            shared = words & wanted
            # A plain sum depends on the order of a set, which differs between processes.
            share = math.fsum(rare[w] for w in shared) / math.fsum(rare[w] for w in wanted)
            if share >= _SHARED and len(shared) > 1:
                best.append((share, row, kind, needle, frozenset(shared)))
    for _, row, kind, needle, shared in sorted(best, key=lambda one: (-one[0], -one[1])):
        have, phrase = ", ".join(sorted(shared)), _shown(needle)
        why = f"the line has {have} of `{phrase}`, but not the phrase"
        yield Near(kind, collected.log.lines[row].number, phrase, why)


def _telling_rows(text: matches.Text) -> Sequence[int]:
    """Return the last lines with a word of failure, and the last lines; no information lines."""
    begin = max(0, len(text.lower) - _REACH)
    rows = [
        row for row, line in enumerate(text.lower[begin:], begin) if line and row not in text.framed
    ]
    telling = [row for row in rows if is_of_failure(text.lower[row])]
    last = {*telling[-_LINES:], *rows[-_LAST_LINES:]}
    return sorted(row for row in last if not text.is_information(row))


def _words(text: str) -> frozenset[str]:
    return frozenset(_WORD.findall(text)) - _COMMON


def _shown(needle: Needle) -> str:
    return " ... ".join(needle)
