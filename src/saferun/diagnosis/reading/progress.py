"""Pure: the training steps in a job's output: where an attempt began and how far it came.

A resumed attempt is recognised by its first step, which lies beyond the first steps of earlier
attempts. A number counts as a step only if a larger one follows in a line of the same form:
"max_steps=20000" is a setting, not progress. Loading, tokenizing and evaluating count from zero, so
the largest first number of all such series is that of the training.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from saferun.diagnosis.reading import loss_lines
from saferun.diagnosis.reading.log_lines import Line

HEAD_BYTES = 64 * 1024  # bytes searched at either end of an attempt's output
# An attempt that ran this long, or made this many steps or epochs, was healthy for a long time.
LONG_S = 1800.0
LONG_STEPS = 500
_LONG_EPOCHS = 10
_LINES = 200  # lines before the failure that are searched for long progress
_RECENT_LINES = 20  # lines before the failure that are searched for a diverged loss
_START_CHARS = 2000  # characters searched in a line of raw output; each state of a bar is a line
_END_CHARS = 400  # characters searched at the end of a log's line: a bar's last state

# A step is a number after one of these words, the position in an epoch, or the number of tqdm's
# bar. Megatron aligns the number to the right and counts skipped steps, too; a logger's location
# may end in a function's name (stage3.py:9:step).
_COUNTER = (
    r"(?<!skipped )(?<!nan )(?<!\d:)\b(?:global[_ ]?step|step|iter|iteration|batch)s?"
    r"[\s=:#/\[\]\"']{1,10}(?P<count>\d{1,9})\b(?!%|[.,]\d)"
)
_IN_EPOCH = (  # of fairseq, and of the examples of PyTorch, timm, DETR and OpenMMLab
    r"\bepoch \d{1,5}: {1,12}(?P<update>\d{1,9}) / \d"
    r"|\b(?:train|epoch|iter)\b[^\[%|]{0,20}(?:\[\d{1,5}\] {0,4})?"
    r"\[ {0,8}(?P<place>\d{1,9}) {0,2}/ {0,8}\d{1,9}(?: {0,2}\(| ?\])"
)
_BAR = (  # of tqdm and Keras 3, whose sign is also matched as its UTF-8 bytes
    r"(?<![\d.])(?P<position>\d{1,9})/\d{1,9} ?\["
    r"|^(?:\x1b\[\d{0,2}m)? {0,8}(?P<drawn>\d{1,9})/\d{1,9}(?:\x1b\[\d{0,2}m)? (?:\x1b\[\d{0,2}m)?"
    r"(?:\u2501|\xe2\x94\x81)"
)
_POSITION = re.compile(r"(?<![\d.])(\d{1,9})/(\d{1,9}) ?\[")
_FLAGS = re.IGNORECASE | re.ASCII
# Numbers that grow in a log without steps: epochs or parts of one, Optuna's trials, a position in a
# list.
_GROWS = re.compile(
    r"\bepoch['\"]?[\s=:#\[(]{1,4}(?P<epoch>\d{1,5}(?:\.\d{1,9})?)\b"
    r"|\btrial (?P<trial>\d{1,6}) (?:finished|pruned)"
    r"|\[ {0,8}(?P<place>\d{1,9}) ?/ ?\d{1,9}\]",
    _FLAGS,
)
_GROWING = ("poch", "POCH", "rial ", "[")  # every line that it fits has one of these
_STEP = re.compile(f"{_COUNTER}|{_IN_EPOCH}|{_BAR}", _FLAGS)
_COUNTED = re.compile(_COUNTER, _FLAGS)  # a bar may count files, so its number is not used here
_EPOCHS = re.compile(
    r"\bepoch(?:\(train\))?['\"]?[\s=:#\[(]{1,4}(\d{1,5})\b|\btrain: {0,3}(\d{1,5}) {0,3}\["
    r"|^\s{1,12}(\d{1,5})/\d{1,5}\s+[\d.]+G\s",
    _FLAGS,
)
# tqdm's position, total (absent in an endless bar) and elapsed time.
_TQDM = re.compile(
    r"(?<![\d.])(?P<at>\d{1,9})(?:/(?P<of>\d{1,9})|it) ?"
    r"\[(?:(?P<h>\d{1,3}):)?(?P<m>\d{1,2}):(?P<s>\d\d)[<,]"
)
# tqdm's bar before its first step, but not at 0: the job resumed there.
_RESUMED = re.compile(r"(?<![\d.])[1-9]\d{0,8}/\d{1,9} ?\[00:00<\?")
_FIRST_STEPS = 1  # a job that reports no higher step is in its first one
_STARTED = 20  # an unfinished bar beyond this shows that the job made steps before
_SAME_AGE = (0.95, 1.1)  # parts of a time-out: a bar of that age began when the wait began
# A bar of tqdm that another message has cut: the percentage done, and after the message the
# remaining time and the rate, or the elapsed time without its end or its start.
_CUT = re.compile(r"\s{0,8}(?P<what>[^|%]{0,60}?)\s{0,4}(?P<done>\d{1,2})%\|")
_OF_STEPS = re.compile(
    r"(?!.{0,60}(?:load|map|fetch|token|filter|prepar|process|eval|valid|test|sampl|sav"
    r"|generat|convert|extract|split|cach|index|build))"
    r"(?:\Z|.{0,60}\b(?:train|epoch|step|iter|fit|progress))",
    re.I,
)
_LEFT = re.compile(
    r"(?P<cut>:)?(?:(?P<h>\d{1,3}):)?(?P<m>\d\d):(?P<s>\d\d), {1,2}[\d.?]{1,9}(?:s/it|it/s)"
)
_SECONDS_A_STEP = re.compile(r"(?<![\d.])(\d{1,5}\.\d\d)s/it")
_CUT_AGE = re.compile(
    r"\| {0,2}\d{1,9}/\d{1,9} ?\[(\d{1,3}):(\d\d):(?!\d\d\])"
    r"|^\s{0,4}(?::|(\d{1,3}):)(\d\d):\d\d<"
)
_NAME_CHARS = 60  # a bar's name is within so many characters of its line
_CUT_LINES = 3  # lines of a cut bar: its start with the message, and the rest
# A loss that is not a number, or above ten thousand, leads to indices outside every table.
_DIVERGED = re.compile(r"loss\w{0,20}['\"]?\s{0,3}[:=]\s{0,3}(?:-?nan\b|-?inf\b|\d{5,30}\b)", re.I)
# The end of a training, as the script or its framework states it. transformers prints its message
# before the model is saved, so that one does not count.
_OVER = re.compile(
    r"`Trainer\.fit` stopped: `max_|\bend time of running main\b"
    r"|^\W{0,4}(?:the )?(?:fine-?tuning|training) (?:is |has )?(?:completed?|finished|done)"
    r"(?: (?:in|after|at) .{1,80})?[.! ]{0,4}$",
    re.I,
)
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBERS = re.compile(r"\d+", re.ASCII)
# The rank of a line without a launcher's prefix: "rank 1", "[GPU0]", "local_rank=1", "[R1]".
_OF_RANK = re.compile(
    r"(?:rank|gpu|process|proc|\[r(?=\d{1,5}\]))[\s_:=#]{0,2}(\d{1,5})(?!\d|[.,]\d|\s?[gmt]i?b)",
    re.IGNORECASE,
)
_FORM = dict.fromkeys(map(ord, "123456789"), "0")


@dataclass(frozen=True, slots=True)
class Step:
    """A line of the log that reports a step."""

    at: int  # index of the line
    rank: int | None
    number: float  # may be a part of an epoch


def first_step(head: bytes) -> int | None:
    """Return the first training step in the beginning of an attempt's output; None if none.

    >>> first_step(b"step 11 loss 3.2\\nstep 12 loss 3.1\\n")
    11
    >>> first_step(b"max_steps=20000 and nothing else")
    """
    return max((first for first, _ in _series(head[:HEAD_BYTES])), default=None)


@dataclass(frozen=True, slots=True)
class Apart:
    """Ranks of one attempt that begin at different steps."""

    difference: str  # "rank 0 at 20, rank 1 at 0"; "" if they begin at the same step
    is_far: bool = False  # a lost line could not explain the difference


def apart(lines: Sequence[Line]) -> Apart | None:
    """Return how the first steps of an attempt's ranks differ; None if too few lines tell.

    Ranks are compared by lines that differ only in their numbers, if the numbers grow by the same
    amount on each rank. A smaller difference than that amount does not count: ranks may take turns.

    Args:
        lines: the lines from the attempt's beginning on; `rank` or the text of a line names its
            rank.
    """
    series: dict[str, dict[int, list[int]]] = {}
    for rank, text in (piece for line in lines for piece in _by_rank(line)):
        for found in (*_STEP.finditer(text), *_EPOCHS.finditer(text)):
            begin, end = found.span(found.lastgroup or found.lastindex or 0)
            by_rank = series.setdefault(_NUMBERS.sub("#", text[:begin]), {})
            numbers, number = by_rank.setdefault(rank, []), int(text[begin:end])
            if number not in numbers[-1:]:
                numbers.append(number)
    result = None
    for by_rank in series.values():
        begun = {rank: numbers for rank, numbers in sorted(by_rank.items()) if len(numbers) > 1}
        amounts = {numbers[1] - numbers[0] for numbers in begun.values()}
        if len(begun) < 2 or len(amounts) > 1 or min(amounts) < 1:
            continue
        low, high = (pick(begun.values(), key=lambda n: n[0]) for pick in (min, max))
        by = min(high[0] - low[0], high[-1] - low[-1]) // min(amounts)
        if by >= 1:
            parts = [f"rank {rank} at {numbers[0]}" for rank, numbers in begun.items()]
            return Apart(", ".join(parts[:8]), by > 1)
        result = Apart("")
    return result


def _by_rank(line: Line) -> Iterator[tuple[int, str]]:
    """Yield each rank and its part of a line; nothing if the line names no rank.

    Lines of two ranks may be joined: torchrun's Python writes a line's end separately.
    """
    text = line.text[:_START_CHARS]
    named = [*_OF_RANK.finditer(text)]
    if not named:
        if line.rank is not None:
            yield line.rank, text
        return
    if line.rank is not None:
        text = line.raw[:_START_CHARS]
        named = [*_OF_RANK.finditer(text)]
    # The parts that ranks printed into one line begin alike for each rank.
    form = _NUMBERS.sub(lambda _: r"\d+", re.escape(text[: named[0].start()]))
    places = [found.start() for found in re.finditer(form + _OF_RANK.pattern, text, re.IGNORECASE)]
    for start, end in zip(places, [*places[1:], len(text)], strict=True):
        part = text[start:end]
        ranks = {int(number) for number in _OF_RANK.findall(part)}
        if len(ranks) == 1:
            yield ranks.pop(), part


def last_step(tail: bytes) -> int | None:
    """Return the last training step in the end of an attempt's output; None if there is none.

    >>> last_step(b"step 11 loss 3.2\\nstep 12 loss 3.1\\n")
    12
    """
    return max((last for _, last in _series(tail[-HEAD_BYTES:])), default=None)


def last_loss(tail: bytes) -> str:
    """Return the last training loss in the end of an attempt's output; "" if there is none.

    >>> last_loss(b"step 11 loss 3.2\\n{'loss': 3.1, 'lr': 0.1}\\nval loss: 2.9 val_loss=2.8\\n")
    '3.1'
    """
    lines = plain_lines(tail[-HEAD_BYTES:])
    return next((loss for line in reversed(lines) if (loss := _loss(line))), "")


def reports(tail: bytes) -> list[tuple[int, str]]:
    """Return the training's steps in the end of an attempt's output, each with its loss.

    Of several growing series, the one that reaches furthest counts. A repeated step, such as
    another rank's, is left out; a line without a loss has "".

    >>> reports(b"step 10 loss 3.2\\nstep 10 val loss 3.3\\nstep 20 loss 3.1\\n")
    [(10, '3.2'), (20, '3.1')]
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for line in plain_lines(tail[-HEAD_BYTES:]):
        counter = _counter(line[:_START_CHARS])
        if counter is None:
            continue
        number, one = int(line[counter[0] : counter[1]]), found.setdefault(counter[2], [])
        if not one or number > one[-1][0]:
            one.append((number, _loss(line)))
    grown = [one for one in found.values() if len(one) > 1]
    return max(grown, key=lambda one: one[-1][0], default=[])


def plain_lines(output: bytes) -> list[str]:
    """Return the lines of raw output without colours; each state of a bar is a line."""
    return _ANSI.sub("", output.decode("latin-1")).replace("\r", "\n").split("\n")


def _loss(line: str) -> str:
    found = loss_lines.own_loss(line[: loss_lines.CHARS])
    return found.value if found else ""


def epoch_in(line: str, before: int | None = None) -> int | None:
    """Return the epoch that an output line names, else `before`."""
    if not ("poch" in line or "EPOCH" in line or "rain: " in line or line[:1] == " "):
        return before
    found = _EPOCHS.search(line)
    return int(found[found.lastindex or 0]) if found else before


def _series(output: bytes) -> Iterator[tuple[int, int]]:
    """Return the first and the largest number of each series that counts upwards."""
    ends: dict[str, tuple[int, int]] = {}
    known: dict[str, tuple[int, int, str] | None] = {}  # form of a line -> its counter
    text = output.decode("latin-1").replace("\r", "\n")  # an empty line has no counter
    alike = zip(text.split("\n"), text.translate(_FORM).split("\n"), strict=True)
    for line, form in alike:
        if form not in known:
            known[form] = _counter(form[:_START_CHARS])
        if (counter := known[form]) is None:
            continue
        begin, end, series = counter
        number = int(line[begin:end])
        first, last = ends.get(series, (number, number))
        ends[series] = (first, max(last, number))
    return (pair for pair in ends.values() if pair[1] > pair[0])


def _counter(line: str) -> tuple[int, int, str] | None:
    """Return where a line has its step, and the text before it; digits do not matter."""
    found = _STEP.search(line)
    if found is None:
        return None
    begin, end = found.span(found.lastgroup or 0)
    return begin, end, _NUMBERS.sub("#", line[:begin].rstrip()[-200:])


def step_in(text: str) -> int | None:
    """Return the step that a line reports; None if it reports none."""
    found = _STEP.search(text[-_END_CHARS:])
    return int(found[found.lastgroup or 0]) if found else None


def steps(lines: Sequence[Line], start: int, end: int) -> list[Step]:
    """Return the steps that the lines from index `start` up to `end` report.

    Args:
        lines: the lines of one log.
        start: index of the first line.
        end: index after the last line.
    """
    reported = []
    for at in range(start, end):
        if (number := _grown(lines[at].text)) is not None:
            reported.append(Step(at, lines[at].rank, number))
    return reported


def _grown(text: str) -> float | None:
    """Return the step that a line reports, or another number that grows in it."""
    number = step_in(text)
    if number is not None or not any(word in text for word in _GROWING):
        return number
    found = _GROWS.search(text[-_END_CHARS:])
    return float(found[found.lastgroup or 0]) if found else None


def went_on(reported: Sequence[Step], at: int, rank: int | None, least: int = 3) -> bool:
    """Return whether a job made enough rising steps after a line.

    Args:
        reported: the steps of the log, from `steps`.
        at: the line's index.
        rank: the rank whose steps count; None for steps without a rank.
        least: the number of steps that is enough.
    """
    # Steps count if they exceed every earlier number, or if they rise one after the other: a
    # different counter may have reached a higher number before.
    count, reached = 0, -1.0
    in_row, last = 0, -1.0
    for step in reported[bisect_left(reported, at, key=lambda step: step.at) :]:
        if step.rank != rank:
            continue
        if step.number > reached:
            count, reached = count + 1, step.number
        in_row, last = (in_row + 1 if step.number > last else 1), step.number
        if max(count, in_row) >= least:
            return True
    return False


def is_written(lines: Sequence[Line], reported: Sequence[Step], at: int, limit: int) -> bool:
    """Return whether steps after a line were written while the job made them.

    They were if they are more than a buffer holds, or if a bar shows them: bars go to stderr, which
    has no buffer.

    Args:
        lines: the log's lines.
        reported: the log's steps, from `steps`.
        at: the line's index.
        limit: size of the buffers in bytes.
    """
    behind = reported[bisect_left(reported, at, key=lambda step: step.at) :]
    if any("%|" in lines[step.at].text for step in behind):
        return True
    return sum(len(line.raw) + 1 for line in lines[at : behind[-1].at]) > limit


def _cut_percent(text: str) -> int:
    """Return the percentage of a bar of steps that another message has cut; 0 for other lines."""
    found = _CUT.match(text) if "%|" in text else None
    if found is None or not _OF_STEPS.match(found["what"]) or _POSITION.search(text):
        return 0
    return int(found["done"])


def _age_of_cut(percent: int, text: str) -> float:
    """Return the least age in seconds of a bar that another message has cut.

    Args:
        percent: the percentage done; each percent counts as a step.
        text: the text of the bar's lines.
    """
    if left := _LEFT.search(text):
        left_s = _elapsed_s(left) + 3600 * bool(left["cut"] and not left["h"])
        return left_s * percent / (100 - percent)
    found = _SECONDS_A_STEP.search(text)
    return float(found[1]) * percent if found else 0.0


def _is_long_cut(lines: Sequence[Line], at: int) -> bool:
    """Return whether a line has a bar of many minutes that another message has cut."""
    text = lines[at].text
    if found := _CUT_AGE.search(text[-_END_CHARS:]):
        hours, minutes = found[1] or found[3] or 1, found[2] or found[4]
        if int(hours) * 3600 + int(minutes) * 60 >= LONG_S:
            return True
    percent = _cut_percent(text)
    if not percent:
        return False
    whole = " ".join(line.text[-_END_CHARS:] for line in lines[at : at + _CUT_LINES])
    return _age_of_cut(percent, whole) >= LONG_S


def _counted(whole: str, end: str) -> Iterator[int]:
    """Yield the training steps at a line's end; a bar must look like a training's."""
    yield from map(int, _COUNTED.findall(end))
    name = whole.partition("%|")[0][:_NAME_CHARS].rstrip(" 0123456789")
    bar = _POSITION.search(end)
    if bar and _OF_STEPS.match(name) and (name.strip() or "loss" in end[bar.end() :]):
        yield int(bar[1])


def is_long(before: Sequence[Line], behind: Sequence[Line] = ()) -> bool:
    """Return whether the last of these lines report many steps, epochs or minutes.

    Args:
        before: the lines up to a failure.
        behind: the lines after the failure, which may continue a bar that the failure has cut.
    """
    last = before[-_LINES:]
    cut = [*last, *behind[: _CUT_LINES - 1]]
    if any(_is_long_cut(cut, at) for at in range(len(last))):
        return True
    for line in last:
        text = line.text[-_END_CHARS:]
        if _RESUMED.search(text):
            continue
        if max(_counted(line.text, text), default=0) >= LONG_STEPS:
            return True
        if any(int("".join(epoch)) >= _LONG_EPOCHS for epoch in _EPOCHS.findall(text)):
            return True
        if any(_elapsed_s(bar) >= LONG_S for bar in _TQDM.finditer(text)):
            return True
    return False


def _elapsed_s(bar: re.Match[str]) -> int:
    return int(bar["h"] or 0) * 3600 + int(bar["m"]) * 60 + int(bar["s"])


def is_early(before: Sequence[Line]) -> bool:
    """Return whether the last of these lines show a job in its first step."""
    last: int | None = None
    for line in before[-_LINES:]:
        text = line.text[-_END_CHARS:]
        if _RESUMED.search(text):
            last = 0
            continue
        if _cut_percent(line.text) > _FIRST_STEPS:
            return False
        if any(int("".join(epoch)) > _FIRST_STEPS for epoch in _EPOCHS.findall(text)):
            return False
        bar = _POSITION.search(text)
        if bar is not None and bar[1] == bar[2]:  # it was completed, such as a bar of loading
            continue
        if found := _STEP.search(text):
            last = int(found[found.lastgroup or 0])
            if last > _STARTED:
                return False
    return last is not None and last <= _FIRST_STEPS


def bar_of_age(before: Sequence[Line], age_s: float) -> bool:
    """Return whether a progress bar that is no training's has run for about `age_s`.

    Args:
        before: the lines up to the failure.
        age_s: the age in seconds.
    """
    for line in before[-_LINES:]:
        text = line.text[-_END_CHARS:]
        found = _TQDM.search(text)
        if found is None or found["at"] == found["of"] or "loss" in text:
            continue
        if _SAME_AGE[0] * age_s <= _elapsed_s(found) <= _SAME_AGE[1] * age_s:
            return True
    return False


def is_over(before: Sequence[Line]) -> bool:
    """Return whether a job said that its training is over, and only saved something since."""
    for line in reversed(before[-_LINES:]):
        text = line.text[-_END_CHARS:]
        if _OVER.search(text):
            return True
        if step_in(text) is not None and "sav" not in text.lower():
            return False
    return False


def diverged(before: Sequence[Line]) -> bool:
    """Return whether the last of these lines report a loss that diverged."""
    return any(_DIVERGED.search(line.text[-_END_CHARS:]) for line in before[-_RECENT_LINES:])
