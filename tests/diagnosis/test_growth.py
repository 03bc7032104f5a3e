"""The work of a diagnosis grows with the length of a log, whatever the log is full of."""

import pytest
from job_logs import diagnose
from repo import tool

fuzz = tool("fuzz")
CRASH = "run.sh: line 3:    71 Segmentation fault      (core dumped) python train.py\n"
OF_WORKER = "ERROR: Unexpected segmentation fault encountered in worker.\n"
FULL_OF = {
    "a program that a shell starts again": lambda count: CRASH * count,
    "crashes of ranks": lambda count: (
        CRASH * 3 + "".join(f"[rank{rank}]: died with SIGSEGV\n" for rank in range(count))
    ),
    "crashes of workers": lambda count: CRASH * 3 + OF_WORKER * (count // 4) + "loading\n" * count,
}


@pytest.mark.parametrize("full_of", FULL_OF.values(), ids=FULL_OF)
def test_twice_the_log_is_at_most_three_times_the_work(full_of):
    def work(count):
        log = full_of(count)
        return fuzz.lines_of(lambda given: diagnose(given, exit_code=1), log, len(log))

    assert work(400) < fuzz.RATIO * work(200)
