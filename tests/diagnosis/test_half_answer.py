"""An unknown failure: the innermost frame of the user's code, and the kinds that are nearest."""

from __future__ import annotations

import subprocess
import sys

import pytest
from job_logs import TIMEOUT, diagnose

from saferun.diagnosis.explaining import failure_report
from saferun.diagnosis.reading import log_reader, user_frame

CUT = """Traceback (most recent call last):
  File "/w/train.py", line 3, in <module>
    main()
  File "/w/train.py", line 9, in main
    loss.backward()
  File "/v/lib/python3.12/site-packages/torch/_tensor.py", line 500, in backward
    torch.autograd.backward(
"""


def test_the_innermost_frame_of_the_users_code_stands_above_the_libraries_frames():
    found = diagnose(CUT)
    assert (found.kind, found.user_frame) == ("unknown", "/w/train.py:9  loss.backward()")


def test_each_ranks_stack_is_read_on_its_own():
    rows = CUT.splitlines()
    log = "".join(f"[rank0]: {row}\n[rank1]: step {at} loss 1.0\n" for at, row in enumerate(rows))
    assert user_frame.innermost(log_reader.of_text(log).lines) == "/w/train.py:9  loss.backward()"


def test_a_stack_of_faulthandler_begins_with_its_innermost_frame(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import faulthandler, json\n"
        "class Deep:\n"
        "    def __iter__(self):\n"
        "        faulthandler.dump_traceback()\n"
        "def main(): json.JSONEncoder(default=lambda value: list(value)).encode(Deep())\n"
        "try: main()\n"
        "except TypeError: pass\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    found = user_frame.innermost(log_reader.of_text(done.stderr).lines)
    assert found == f"{script}:4"


@pytest.mark.parametrize(
    "path",
    [
        "/usr/lib/python3.12/threading.py",
        "/v/site-packages/torch/x.py",
        "<string>",
        "/v/bin/torchrun",
    ],
)
def test_a_stack_without_code_of_the_users_has_no_such_frame(path):
    log = f'Traceback (most recent call last):\n  File "{path}", line 5, in run\n'
    assert user_frame.innermost(log_reader.of_text(log).lines) == ""


def test_a_sign_that_nearly_fits_is_named_with_what_speaks_against_it():
    found = diagnose("node7:1:2 [0] NCCL INFO Failed to open libibverbs.so[.1]\nbye\n")
    assert found.kind == "unknown"
    (near,) = found.nearest
    assert (near.kind, near.line) == ("nccl-ib-error", 1)
    assert "as information" in near.against
    assert failure_report.half_answer(found) == [
        f"nearest is nccl-ib-error; against it: {near.against} (line 1)"
    ]


def test_what_weighs_less_than_an_unknown_end_is_near_with_what_took_its_weight():
    found = diagnose(CUT + "WARNING: stale file handle\n")
    assert (found.kind, found.nearest[0].kind) == ("unknown", "stale-file-handle")
    assert found.nearest[0].against == "a warning"


def test_a_line_that_shares_most_words_of_a_phrase_is_near():
    found = diagnose("foo failed: the connection was refused by the store\n")
    assert found.kind == "unknown"
    assert "rendezvous-connect-failed" in [near.kind for near in found.nearest]
    assert "connection, refused" in found.nearest[0].against


def test_last_lines_without_a_word_of_failure_are_compared_too():
    log = "NCCL INFO via P2P\nstep 3\nE: dataset worker stopped unexpectedly, giving up\n"
    near = diagnose(log).nearest[0]
    assert (near.kind, near.line) == ("dataloader-worker-died", 3)


def test_at_most_two_kinds_are_named_each_once():
    row = "foo {} failed: connection was refused, peer has closed it, timed out at the barrier"
    log = "\n".join(row.format(number) for number in range(9))
    assert len({near.kind for near in diagnose(log).nearest}) == 2
    assert len(diagnose(log).nearest) == 2


def test_a_log_like_no_failure_has_no_near_kind():
    found = diagnose("hello\nworld\n")
    assert (found.kind, found.nearest, found.user_frame) == ("unknown", (), "")


def test_a_known_failure_needs_no_half_answer():
    found = diagnose(TIMEOUT)
    assert (found.nearest, found.user_frame, failure_report.half_answer(found)) == ((), "", [])


def test_the_longest_phrase_is_the_nearest():
    row = "node7:1:2 [0] NCCL INFO {}\n"
    log = row.format("Failed to open libibverbs.so") + row.format("Connection timed out")
    longest = max(diagnose(log).nearest, key=lambda near: len(near.phrase))
    assert diagnose(log).nearest[0] == longest
    assert longest.phrase == "failed to open libibverbs"


def test_a_cut_traceback_weighs_less_than_any_other_word_of_the_cause():
    cut = 'Traceback (most recent call last):\n  File "/w/fit.py", line 3, in run\n    main()\n'
    assert diagnose(cut).kind == "user-exception"
    assert diagnose(cut + "Killed\n").kind == "host-oom-killed"
    assert diagnose(cut, exit_code=-11).kind == "segfault"
