"""Pure: the training's own loss in a line of output.

A loss is the number behind that word, in a line about training: `val_loss`, `best loss`, `aux_loss`
and what a line about an evaluation has are none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CHARS = 1000  # searched in a line

_VALUE = r"[-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|nan|inf(?:inity)?)(?:\.0)?"
# "loss: 2.3", "loss nan", "loss=nan.0", "'loss': '2.31'", "Loss: 6.93 (6.94)", "lm loss: 9.9E+00",
# "loss: tensor(nan, …", "[Loss] 2.3". Words may stand before it, as in "train/loss", and behind it:
# "train_loss_step", "loss/train/total". A wide colon is read as the bytes that it has in UTF-8.
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
# Words that may stand before the training's own loss; with any other one it is another loss.
_OWN = (
    *("train", "training", "lm", "mlm", "ce", "nll", "total", "overall", "step", "batch", "avg"),
    *("average", "mean", "running", "current", "iter", "iteration", "epoch", "smooth", "smoothed"),
    *("global", "rank", "gpu", "info", "debug", "reduced"),
)
_EVALUATES = re.compile(
    r"(?<![a-z])(?:val|valid|validation|eval\w*|test\w*|dev|best)(?![a-z])", re.I
)
_WORDS = re.compile(r"(?<![\dA-Za-z.])[A-Za-z]{2,}")
_NO_FORM = ("nan", "inf", "it")  # words that come and go with the numbers beside a loss


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a line."""

    form: str  # the words before it: losses of one form are of one series
    value: str


def own_loss(line: str) -> Loss | None:
    """Return the loss of the training that a line reports; None where it reports none.

    Args:
        line: its first CHARS characters, without colours.
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
        # The words between the last mark and the loss: "Average training loss".
        near = re.split(r"[^A-Za-z ]", before)[-1]
        words = [*near.lower().split(), *re.split(r"[_/.-]", found["word"].lower())]
        if all(word in _OWN for word in words if word):
            form = " ".join(w for w in _WORDS.findall(before) if w.lower() not in _NO_FORM)
            return Loss(f"{form} {found['word']}{found['behind']}", found["value"])
    return None
