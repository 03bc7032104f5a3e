"""The steps of an attempt over time, from what was noted while it ran and from its tail."""

from saferun.journal import training_steps
from saferun.journal.training_steps import Point

TAIL = b"".join(b"step %d loss %.1f\n" % (n, 9 - n / 10) for n in range(10, 61, 10))


def made(tail: bytes, noted: tuple[Point, ...] = (), first: int | None = 10):
    return training_steps.steps(noted, [tail], first, 20.0, 80.0)


def test_without_notes_steps_are_equally_long_from_the_start_of_the_work():
    found = made(TAIL)
    assert (found.began, found.last) == (0, 60)
    assert [(p.s, p.step) for p in found.points] == [(20 + n, n) for n in range(0, 61, 10)]
    assert [p.loss for p in found.points[:3]] == [None, 8.0, 7.0]


def test_notes_tell_when_a_step_came():
    found = made(TAIL, (Point(40.0, 10), Point(60.0, 60)))
    assert [(p.s, p.step) for p in found.points[:3]] == [(20.0, 0), (40.0, 10), (44.0, 20)]
    assert training_steps.reached_s(found, 35) == 50.0
    assert training_steps.reached_s(found, 61) is None


def test_checkpoints_tell_when_a_step_came_unless_their_numbers_count_something_else():
    steps = training_steps.steps((Point(60.0, 40),), [TAIL], 10, 20.0, 80.0, (Point(50.0, 20),))
    assert [(p.s, p.step) for p in steps.points[1:5]] == [(35, 10), (50, 20), (55, 30), (60, 40)]
    epochs = (Point(70.0, 20), Point(75.0, 300))
    steps = training_steps.steps((Point(60.0, 40),), [TAIL], 10, 20.0, 80.0, epochs)
    assert steps == made(TAIL, (Point(60.0, 40),))


def test_notes_have_what_the_tail_has_lost():
    found = made(b"step 50 loss 4\nstep 60 loss 3\n", (Point(30.0, 20, 7.0),))
    assert [(p.step, p.loss) for p in found.points] == [(0, None), (20, 7), (50, 4), (60, 3)]


def test_other_ranks_and_losses_that_are_no_number_make_no_point_twice():
    found = made(b"step 1 loss 4\nstep 1 loss 5\nstep 2 loss nan\n", first=1)
    assert [(p.step, p.loss) for p in found.points] == [(0, None), (1, 4), (2, None)]
    assert made(b"step 45 loss 4\nstep 50 loss 3\n", first=45).began == 40  # it went on
    assert made(b"hello\n", first=None) == training_steps.Steps()


def test_what_was_noted_is_read_back_and_nonsense_is_skipped(tmp_path):
    points = (Point(1.0, 5, 2.5), Point(2.0, 9))
    text = training_steps.as_text(points) + "[0, 1, 2]\n[3, 9, 1]\n{}\n[1e999, 99, 1]\nx\n"
    (tmp_path / "attempt-1.steps").write_text(text, encoding="utf-8")
    assert training_steps.read(str(tmp_path), 1) == points


def test_many_points_are_thinned_and_the_last_one_stays():
    found = made(b"".join(b"step %d loss 1\n" % n for n in range(1, 2000)), first=1)
    assert len(found.points) <= 161
    assert found.points[-1].step == 1999
