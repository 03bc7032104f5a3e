"""What a run says on stderr between its attempts."""

from outcomes import outcome

from saferun.diagnosis.attempt_outcome import AttemptOutcome, Decision
from saferun.diagnosis.deciding.retry_policy import AGAIN
from saferun.supervise.records import report


def said(*first_steps: int | None, resumes: bool = False) -> str:
    """Return the line after attempts that have begun at these steps, and failed."""
    history: list[AttemptOutcome] = [
        outcome(number=number, exit_code=1, lived_s=60.0, first_step=step)
        for number, step in enumerate(first_steps, 1)
    ]
    decision = Decision(AGAIN, "it may be temporary")
    (line,) = report.attempt_lines(history, decision, "", None, resumes=resumes)
    return line


def test_a_retry_without_a_checkpoint_says_where_it_begins_and_once_how_to_resume():
    beginning = ": attempt {} starts at the beginning: no checkpoint is known"
    how = "; `saferun help retry.resume` says how to go on from one"
    assert said(1).endswith(beginning.format(2) + how)
    assert said(None).endswith(beginning.format(2) + how)
    assert said(1, 1).endswith(beginning.format(3))


def test_a_retry_that_may_go_on_from_somewhere_does_not_say_that_it_begins_anew():
    assert said(1, resumes=True).endswith(": attempt 2 starts")
    assert said(1, 41).endswith(": attempt 3 starts"), "the script resumes by itself"
