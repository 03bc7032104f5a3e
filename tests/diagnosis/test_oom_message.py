"""Out-of-memory messages: their numbers, and the kind that these decide."""

from __future__ import annotations

import pytest
from job_logs import FULL_CARD, diagnose

from saferun.diagnosis import oom_message


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ((2048, 24000, 1000, 22800, 400), "cuda-oom"),
        ((1500, 40000, 900, 38500, 13000), "cuda-oom-fragmentation"),
        ((1500, 40000, 900, 38500, 1400), "cuda-oom"),
        ((546, 16000, 514, 15400, 737), "cuda-oom"),
        ((64, 80000, 20, 1200, 12), "cuda-oom-other-process"),
        ((20, 24000, 18900, 3200, 100), "cuda-oom-despite-free"),
        ((130_000_000, 80000, 38000, 28000, 700), "cuda-oom"),
        ((11_000, 12000, 0, 23900, 11_900), "cuda-oom"),
        ((64, None, None, None, None), "cuda-oom"),
        ((20, 24000, 400, 500, 10), "cuda-oom-other-process"),
        ((2, 262_000, 250_000, 1072, 55, 1075), "cuda-oom"),
        ((2, 262_000, 250_000, 1072, 300, 1075), "cuda-oom-fragmentation"),
        ((2, 262_000, 250_000, 1072, 55, 262_000), "cuda-oom-despite-free"),
    ],
    ids=[
        "full", "idle serves it", "idle is smaller than asked", "idle is under a tenth",
        "somebody else", "free is plenty", "more than the card", "oversubscribed", "no numbers",
        "what the driver keeps back", "its own limit is full", "idle below its own limit",
        "no limit",
    ],
)  # fmt: skip
def test_the_numbers_decide_the_kind(numbers, kind):
    assert oom_message.kind(oom_message.Memory(*numbers)) == kind


def test_the_explanation_holds_the_numbers_of_the_message():
    assert "2.00 GiB asked for, 1.10 GiB free" in diagnose(FULL_CARD).explanation
    limited = FULL_CARD.replace(" is free. ", " is free. 22.00 GiB allowed; ")
    assert "22.00 GiB allowed by the process's own limit" in diagnose(limited).explanation


def test_a_message_that_the_terminal_broke_mid_word_is_read():
    broken = FULL_CARD[:150] + "\n" + FULL_CARD[150:300] + "\n" + FULL_CARD[300:]
    assert "22.5" in diagnose(broken).explanation


def test_a_size_that_no_process_can_have_is_ignored():
    below_zero = "this process has 17179869184.00 GiB memory in use"
    text = FULL_CARD.replace("this process has 22.53 GiB memory in use", below_zero)
    assert oom_message.read(text).held == oom_message.read(text.replace(below_zero, "")).held
    assert diagnose(text).kind == "cuda-oom"
