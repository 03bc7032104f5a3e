"""Does the time of a pattern grow faster than the text? Ratios decide it, not a limit in seconds.

Four times the text takes a linear pattern four times as long, a quadratic one sixteen times.
Times are CPU times of this process. One such ratio may still be anything between 3 and 30 on a busy
machine, so ratios are taken until one verdict leads by `_LEAD`.
"""

import re
import time
from collections.abc import Callable, Iterator

MEASURABLE_S = 0.002  # shorter times are not compared
_ENOUGH_CHARS = 8_000  # a quadratic pattern takes much longer than MEASURABLE_S for these
_SMALL_CHARS = 512  # up to which a text grows slowly, as an exponential pattern may take minutes
_OVER_LINEAR = 8.0  # time(4n) / time(n): 4 is linear, 16 quadratic
_LEAD = 4  # one ratio in twenty is wrong: one lead in a hundred thousand
_EXPLODES = 8.0  # time(1.25n) / time(n): 1.25 is linear, 1.56 quadratic
_COUNT = re.compile(r"[{,](\d+)\}")


def runs_away(pattern: re.Pattern[str], unit: str) -> bool:
    """Return whether the search of a text that repeats `unit` takes more than linear time.

    A ratio counts where the text is longer than the pattern's bounded repetitions: below that
    length a bounded pattern may be quadratic. What is too large is measured again, a
    ratio on a text of twice the length: only two in a row count.
    """
    bound = 2 * max((int(count) for count in _COUNT.findall(pattern.pattern)), default=200)
    before = MEASURABLE_S
    for length in _lengths(max(_ENOUGH_CHARS, 2 * bound)):
        took = _cpu_s(pattern, unit, length)
        explodes_s = _EXPLODES * max(before, MEASURABLE_S)
        if took > explodes_s and _cpu_s(pattern, unit, length) > explodes_s:
            return True
        if took >= MEASURABLE_S and length >= bound:
            return all(
                _is_over_linear(lambda chars: _cpu_s(pattern, unit, chars), length * factor)
                for factor in (1, 2)
            )
        before = took
    return False


def _lengths(last: int) -> Iterator[int]:
    length = 16
    while length <= last:
        yield length
        length = length * 5 // 4 if length < _SMALL_CHARS else length * 2


def _is_over_linear(seconds: Callable[[int], float], length: int) -> bool:
    """Return whether four times the length takes much more than four times the seconds."""
    lead = 0
    while abs(lead) < _LEAD:
        once, longer = (min(seconds(chars) for _ in range(3)) for chars in (length, 4 * length))
        lead += 1 if longer > _OVER_LINEAR * once else -1
    return lead > 0


def _cpu_s(pattern: re.Pattern[str], unit: str, length: int) -> float:
    """Return the CPU seconds of one search and one match in a text that ends differently."""
    text = (unit * (length // len(unit) + 1))[:length] + "\0"
    began = time.process_time()
    pattern.search(text)
    pattern.match(text)
    return time.process_time() - began


def grows_faster_than_the_text(
    use: Callable[[str], object], unit: str, most: int = 100_000
) -> bool:
    """Return whether four times the text takes a use of a pattern much more than four times.

    Args:
        use: a method of a pattern, such as `match`.
        unit: what the text repeats.
        most: characters of the longest text.
    """
    length = 200
    while length * 4 <= most:
        if _seconds(use, unit, length) >= MEASURABLE_S / 4:
            return _is_over_linear(lambda chars: _seconds(use, unit, chars), length)
        length *= 4
    return False


def _seconds(use: Callable[[str], object], unit: str, length: int) -> float:
    text = (unit * (length // len(unit) + 1))[:length] + "\0"
    began = time.process_time()
    use(text)
    return time.process_time() - began
