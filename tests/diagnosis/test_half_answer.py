"""An unknown failure: the innermost frame of the user's code, and the kinds that are nearest."""

import subprocess
import sys

import pytest
from cases import check_cases
from job_logs import TIMEOUT, TRACEBACK, diagnose
from sandbox import in_ascii

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


def test_frames_of_compiled_python_are_no_code_of_the_users():
    log = (
        f'{TRACEBACK}  File "data/users.py", line 9, in rows\n    s.execute(q)\n'
        '  File "lib/cluster.py", line 2677, in lib.cluster.Session.execute\n'
        '  File "src/driver/impl/transport.pyx", line 340, in driver.impl.read\n'
        "lib.Unknown: x\n"
    )
    found = user_frame.innermost(log_reader.of_text(log).lines)
    assert found == "data/users.py:9  s.execute(q)"


def test_a_stack_of_faulthandler_begins_with_its_innermost_frame(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import faulthandler, json\n"
        "class Deep:\n"
        "    def __iter__(self):\n"
        "        faulthandler.dump_traceback()\n"
        "def main(): json.JSONEncoder(default=lambda value: list(value)).encode(Deep())\n"
        "try: main()\n"
        "except TypeError: pass\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    found = user_frame.innermost(log_reader.of_text(done.stderr).lines)
    assert found == f"{in_ascii(script)}:4"


OTHERS = (
    "/usr/lib/python3.12/threading.py",
    "/v/site-packages/torch/x.py",
    "<string>",
    "/v/bin/torchrun",
)


def test_a_stack_without_code_of_the_users_has_no_such_frame():
    for path in OTHERS:
        log = f'Traceback (most recent call last):\n  File "{path}", line 5, in run\n'
        assert user_frame.innermost(log_reader.of_text(log).lines) == ""


IB = "node7:1:2 [0] NCCL INFO Failed to open libibverbs.so[.1]\n"
STALE = "WARNING: stale file handle\n"
STOPPED = "NCCL INFO via P2P\nstep 3\nE: dataset worker stopped unexpectedly, giving up\n"
NEAREST = {  # a log, the kind that is nearest, its line, what speaks against it
    "a sign that nearly fits": (f"{IB}bye\n", "nccl-ib-error", 1, "as information"),
    "what weighs little": (f"{CUT}{STALE}", "stale-file-handle", 8, "a warning"),
    "words of a phrase": (
        "foo failed: the connection was refused by the store\n",
        "rendezvous-connect-failed", 1, "connection, refused",
    ),
    "a last line without a word of failure": (STOPPED, "dataloader-worker-died", 3, "worker"),
    "the longest phrase": (
        f"{IB}node7:1:2 [0] NCCL INFO Connection timed out\n", "nccl-ib-error", 1, "libibverbs",
    ),
}  # fmt: skip


def test_the_nearest_kind_of_an_unknown_failure_is_named_with_what_speaks_against_it():
    def check(log, kind, line, against):
        found = diagnose(log)
        near = found.nearest[0]
        assert (found.kind, near.kind, near.line) == ("unknown", kind, line)
        assert against in near.against
        shown = f"nearest is {kind}; against it: {near.against} (line {line})"
        assert failure_report.half_answer(found)[0] == shown

    check_cases(NEAREST, check)


def test_at_most_two_kinds_are_named_each_once():
    row = "foo {} failed: connection was refused, peer has closed it, timed out at the barrier"
    near = diagnose("\n".join(row.format(number) for number in range(9))).nearest
    assert len({one.kind for one in near}) == len(near) == 2


@pytest.mark.parametrize(
    ("log", "kind"), [("hello\nworld\n", "unknown"), (TIMEOUT, "nccl-timeout")]
)
def test_a_log_like_no_failure_and_a_known_one_have_no_half_answer(log, kind):
    found = diagnose(log)
    assert (found.kind, found.nearest, found.user_frame) == (kind, (), "")


def test_a_cut_traceback_weighs_less_than_any_other_word_of_the_cause():
    cut = 'Traceback (most recent call last):\n  File "/w/fit.py", line 3, in run\n    main()\n'
    assert diagnose(cut).kind == "user-exception"
    assert diagnose(cut + "Killed\n").kind == "host-oom-killed"
    assert diagnose(cut, exit_code=-11).kind == "segfault"
