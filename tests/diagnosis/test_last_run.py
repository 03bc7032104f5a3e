"""Where the last run of a log begins to which several were written."""

import collections

import pytest

from saferun.diagnosis.reading import last_run, log_reader, progress

STEPS = "\nstep {} loss 2.5\nstep {} loss 2.4\nstep {} loss 2.3"
FRAMES = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n'
LOGS = {
    "one run": ("loading x\nstep 1 loss 2.5", 0),
    "an end at the end": ("loading x\nKilled", 0),
    "torchrun's restart": ("a\nb\n3/3 attempts left; will restart worker group\nloading x", 3),
    "a restart that printed nothing": ("a\nwill restart worker group", 0),
    "the first lines again": ("loading 1\nb\nKilled\nother\nloading 2\nc", 4),
    "the first line but a warning again": ("A Warning\nb\nKilled\nother\nA Warning\nc", 0),
    "the first lines without an end": ("loading 1\nb\nc\nloading 2\nd", 0),
    "a command of a shell": ("a\nKilled\nx\n+ torchrun t.py\nb", 3),
    "a command of a shell before any end": ("a\n+ torchrun t.py\nb\nKilled", 0),
    "a shell's trace of a restart": ("a\nwill restart worker group\nb\n+ torchrun t.py\nc", 2),
    "a word that ends nothing": ("loading 1\nwe Killed it\nloading 2\nb", 0),
    "the first lines after three steps": (
        "load 1\nKilled" + STEPS.format(1, 2, 3) + "\nload 2\nb",
        2,
    ),
    "an exception that comes again": (f"{FRAMES}KeyError: 1\nb\nKilled\nc\n{FRAMES}KeyError: 2", 0),
    "frames that are the first lines again": (f"{FRAMES}Killed\nb\n{FRAMES}c", 0),
    "three steps": ("a\nKilled" + STEPS.format(1, 2, 3) + "\nlast words", 2),
    "two steps": ("a\nKilled" + STEPS.format(1, 1, 2), 0),
    "steps after two ends": ("a" + ("\nKilled" + STEPS.format(7, 8, 9)) * 2, 6),
    "what came after the last start": ("loading 1\nKilled\nloading 2\nb\nloading 3", 2),
}


@pytest.mark.parametrize(("log", "start"), LOGS.values(), ids=LOGS)
def test_the_last_run_begins_where_another_one_is_under_way(log, start):
    assert last_run.last_start(log_reader.of_text(log).lines) == start


def test_of_a_log_of_tracebacks_each_line_is_asked_for_its_step_but_a_few_times(monkeypatch):
    """A look back from each of them would take hours for 100 MB."""
    asked: collections.Counter[str] = collections.Counter()
    step_in = progress.step_in

    def counted(text):
        asked["lines"] += 1
        return step_in(text)

    monkeypatch.setattr(progress, "step_in", counted)
    trace = (
        'Traceback (most recent call last):\n  File "/w/fit.py", line 8, in <module>\nKeyError: 1\n'
    )
    lines = log_reader.read((trace.encode() * 300,)).lines
    assert last_run.last_start(lines) == 0
    assert asked["lines"] < 4 * len(lines)
