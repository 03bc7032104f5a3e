"""Pure: the training's own loss in a line of output.

It is the number after the word "loss" in a line about training; `val_loss`, `best loss`, `aux_loss`
and the losses in a line about evaluation do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHARS = 1000  # characters of a line that are searched

_VALUE = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?:\.0)?"
# "loss: 2.3", "loss nan", "loss=nan.0", "'loss': '2.31'", "Loss: 6.93 (6.94)", "lm loss: 9.9E+00",
# "loss: tensor(nan, …", "[Loss] 2.3". Words may stand before it ("train/loss") and after it
# ("train_loss_step", "loss/train/total"). A wide colon is matched as its UTF-8 bytes.
_LOSS = re.compile(
    r"(?<![\w./-])(?P<word>(?:[a-z]{1,20}[_/.-]){0,2})loss(?P<behind>(?:[_/](?:step|total|train)){0,2})"
    r"['\"\]]?\s{0,5}(?:[:=]|\xef\xbc\x9a|\uff1a)?\s{0,5}"
    rf"(?:['\"]|tensor\()?(?P<value>{_VALUE})(?![\w%]|\.\d)",
    re.IGNORECASE | re.ASCII,
)
# Ultralytics prints columns: epoch, memory, the losses, instances, size.
_COLUMNS = re.compile(
    rf"^\s{{1,12}}\d{{1,5}}/\d{{1,5}}\s+[\d.]+G\s+(?P<value>{_VALUE})\s+(?:{_VALUE}\s+)+\d+:",
    re.IGNORECASE | re.ASCII,
)
# Words that may precede the training's own loss; after any other word it is another loss.
_OWN = (
    *("train", "training", "lm", "mlm", "ce", "nll", "total", "overall", "step", "batch", "avg"),
    *("average", "mean", "running", "current", "iter", "iteration", "epoch", "smooth", "smoothed"),
    *("global", "rank", "gpu", "info", "debug", "reduced"),
)
_EVALUATES = re.compile(
    r"(?<![a-z])(?:val|valid|validation|eval\w*|test\w*|dev|best)(?![a-z])", re.I
)
_WORDS = re.compile(r"(?<![\dA-Za-z.])[A-Za-z]{2,}")
_NO_FORM = ("nan", "inf", "it")  # words that may or may not accompany a loss


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss in a line."""

    form: str  # words before the loss; losses of one form are one series
    value: str


def own_loss(line: str) -> Loss | None:
    """Return the training's loss in a line; None if it has none.

    Args:
        line: the line's first CHARS characters, without colours.
    """
    if "loss" in line or "Loss" in line or "LOSS" in line:
        return _behind_the_word(line)
    found = _COLUMNS.match(line)
    return Loss("columns", found["value"]) if found else None


def _behind_the_word(line: str) -> Loss | None:
    for found in _LOSS.finditer(line):
        before = line[: found.start()]
        if _EVALUATES.search(before):
            return None
        # The words between the last punctuation and the loss: "Average training loss".
        near = re.split(r"[^A-Za-z ]", before)[-1]
        words = [*near.lower().split(), *re.split(r"[_/.-]", found["word"].lower())]
        if all(word in _OWN for word in words if word):
            form = " ".join(w for w in _WORDS.findall(before) if w.lower() not in _NO_FORM)
            return Loss(f"{form} {found['word']}{found['behind']}", found["value"])
    return None
