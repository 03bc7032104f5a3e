"""The part of a tail that a person reads: what torchrun says of itself is folded."""

from saferun.journal.tail_excerpt import excerpt

RULE, DASHES = "=" * 60, "-" * 60
TAIL = f"""\
W1127 10:27:48.736000 27623 torch/distributed/run.py:874]
W1127 10:27:48.736000 27623 torch/distributed/run.py:874] {"*" * 41}
W1127 10:27:48.736000 27623 torch/distributed/run.py:874] Setting OMP_NUM_THREADS environment
W1127 10:27:48.736000 27623 torch/distributed/run.py:874] {"*" * 41}
step 20 loss 2.8485
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 9, in <module>
[rank1]:     step()
[rank1]:   File "/v/lib/python3.11/site-packages/torch/optim/optimizer.py", line 530, in wrapper
[rank1]:     out = func(*args)
[rank1]:           ^^^^^^^^^^^
[rank1]:   File "/v/lib/python3.11/site-packages/torch/nn/modules/module.py", line 9, in call
[rank1]:     return self.forward()
[rank1]: KeyError: 'label'
E1127 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/v/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
{RULE}
train.py FAILED
{DASHES}
Failures:
  <NO_OTHER_FAILURES>
{RULE}
the shell's own line
"""


def folded(tail: str, line: str = "") -> list[tuple[str, str]]:
    return [(row.fold, row.text) for row in excerpt("stderr", tail.encode(), line).rows]


def test_what_few_read_is_folded_and_the_rest_is_shown():
    rows = folded(TAIL, "[rank1]: KeyError: 'label'")
    shown = [text for fold, text in rows if not fold]
    assert shown == [
        "step 20 loss 2.8485",
        "[rank1]: Traceback (most recent call last):",
        '[rank1]:   File "/w/train.py", line 9, in <module>',
        "[rank1]:     step()",
        "[rank1]: KeyError: 'label'",
        "the shell's own line",
    ]
    folds = [fold for fold, _ in rows if fold]
    assert folds == [
        *["torchrun's remark about OMP_NUM_THREADS"] * 4,
        *["frames below site-packages"] * 5,
        *["torchrun's own traceback and summary"] * 11,
    ]


def test_the_line_that_decided_is_never_folded():
    assert ("", "train.py FAILED") in folded(TAIL, "train.py FAILED")


def test_the_line_that_decided_is_marked_in_the_traceback_and_not_in_the_summary():
    repeated = TAIL.replace("<NO_OTHER_FAILURES>", "traceback :\n  KeyError: 'label'")
    rows = excerpt("stderr", repeated.encode(), "KeyError: 'label'").rows
    assert [row.text for row in rows if row.decides] == ["[rank1]: KeyError: 'label'"]


def test_a_summary_that_is_cut_off_is_shown():
    rows = folded(TAIL.partition("train.py FAILED")[0])
    assert ("", RULE) in rows
