"""Out-of-memory messages: their numbers, and the kind that these decide."""

import pytest
from job_logs import FULL_CARD, diagnose

from saferun.diagnosis.reading import oom_message


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
        ((100, 2000, 125, 1800, 0), "cuda-oom-despite-free"),
        ((100, 2000, 110, 1800, 0), "cuda-oom"),
        ((1000, 1000, 0, 1000, 1000), "cuda-oom-fragmentation"),
        ((500, 4000, 100, 3000, 400), "cuda-oom-fragmentation"),
        ((500, 1000, 0, 900, 499.5), "cuda-oom"),
        ((64, 80000, None, 1200, 12), "cuda-oom"),
        ((100, 1000, 0, 400, 0), "cuda-oom-other-process"),
        ((100, 1000, 0, 450, 0), "cuda-oom"),
        ((100, 262_000, 250_000, 500, 0, 1075), "cuda-oom-despite-free"),
        ((200, 262_000, 250_000, 1075, 199.5, 1075), "cuda-oom"),
        ((200, 262_000, None, 1074, 199.5, 1075), "cuda-oom"),
    ],
    ids=[
        "full", "idle serves it", "idle is smaller than asked", "idle is under a tenth",
        "somebody else", "free is plenty", "more than the card", "oversubscribed", "no numbers",
        "what the driver keeps back", "its own limit is full", "idle below its own limit",
        "no limit", "just enough is free", "not enough is free", "all of it is idle",
        "idle and free serve it", "they nearly do", "free is not known", "half is others'",
        "less than half is", "room below its own limit", "none below it", "nor known to be",
    ],
)  # fmt: skip
def test_the_numbers_decide_the_kind(numbers, kind):
    assert oom_message.kind(oom_message.Memory(*numbers)) == kind


OLD = "CUDA out of memory. Tried to allocate 512 bytes (GPU 0; 10.00 GiB total capacity; "
WORDINGS = {
    "2.13": (FULL_CARD, (2048, 23.64 * 1024, 1.1 * 1024, 22.53 * 1024, 390.11, None)),
    "2.13, of what is allocated alone": (
        "Of the allocated memory 8.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by "
        "PyTorch but unallocated.",
        (None, None, None, 9216, 1024, None),
    ),
    "1.13": (
        OLD + "8.00 GiB already allocated; 10.00 MiB free; 9.50 GiB reserved in total by PyTorch)",
        (2**-11, 10240, 10, 9728, 1536, None),
    ),
    "1.3": (
        OLD + "8.00 GiB already allocated; 10.00 MiB free; 1.00 GiB cached)",
        (2**-11, 10240, 10, 9216, 1024, None),
    ),
    "0.4": (OLD + "8.00 GiB already allocated)", (2**-11, 10240, None, 8192, None, None)),
    "none": ("CUDA error: out of memory", (None,) * 6),
}


def test_the_numbers_of_each_releases_wording_are_read():
    found = {release: oom_message.read(text) for release, (text, _) in WORDINGS.items()}
    assert found == {
        release: oom_message.Memory(*numbers) for release, (_, numbers) in WORDINGS.items()
    }


def test_the_explanation_holds_the_numbers_of_the_message():
    numbers = (
        "2.00 GiB asked for, 1.10 GiB free, 22.53 GiB held by this process, "
        "390 MiB of that idle in the allocator, 23.64 GiB on the card."
    )
    assert oom_message.sentence(oom_message.read(FULL_CARD)) == numbers
    assert numbers in diagnose(FULL_CARD).explanation
    assert oom_message.sentence(oom_message.Memory(1024, *[None] * 4)) == "1.00 GiB asked for."
    assert oom_message.sentence(oom_message.Memory(*[None] * 5)) == ""
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
