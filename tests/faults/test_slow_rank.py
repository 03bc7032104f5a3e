"""A rank that the others wait for is named once, and left alone; equal ones are not."""

import signal
import sys
from pathlib import Path

import pytest
from helpers import until
from runs import LIMIT_S, Run, program, run

pytestmark = pytest.mark.slow  # ranks train for a minute
COMMAND = [sys.executable, program("asks_soon")]


def training(folder: Path, factor: float, *more: str, ranks: int = 2) -> Run:
    words = ["--profile=cpu", f"--nproc-per-node={ranks}", *more]
    argv = [*words, program("unequal_ranks"), str(factor)]
    environ = {"ASKED": str(folder / "asked")}
    return run(folder, *argv, command=COMMAND, env=environ)


def end(job: Run) -> None:
    job.process.send_signal(signal.SIGTERM)
    job.end()
    job.nothing_lives()


def answers(folder: Path) -> list[str]:
    path = folder / "asked"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def slow(job: Run) -> list[str]:
    return [line for line in job.messages() if " is slow: " in line]


@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_a_slow_rank_is_named_once_with_what_the_job_loses(tmp_path, factor):
    with training(tmp_path, factor) as job:
        job.wait_for_message("rank 1 is slow: the others waited for it throughout the last ")
        ranks = job.ranks()
        end(job)
        (event,) = job.events("slow")
        shown, report = job.ask("runs", "show", "last"), job.ask("runs", "report", "last")
        left = list((job.journal / "receipts").glob("*.times"))
    (line,) = slow(job)
    assert (event["rank"], left, sorted(ranks)) == (1, [], [0, 1])
    assert 0.1 < event["share"] < 1 - 1 / factor + 0.1
    assert f"the job loses {event['share']:.0%} of its time by it" in line
    for page in (shown, report):
        assert "rank 1 is slow: " in " ".join(page.split())
    assert answers(tmp_path)[-2:] == ["[0, 1]", "[0, 1]"]


def test_ranks_that_are_equal_but_for_noise_are_not_named(tmp_path):
    with training(tmp_path, 1.0) as job:
        until(lambda: len(answers(tmp_path)) > 2, "three answers", LIMIT_S)
        end(job)
        assert (job.events("slow"), job.events("fault"), slow(job)) == ([], [], [])
    assert set(answers(tmp_path)) == {"[0, 1]"}
