"""The Python stack of a crash in native code, from what faulthandler writes."""

import subprocess
import sys

from repo import PROGRAMS
from sandbox import frame

from saferun.diagnosis.reading import log_reader
from saferun.diagnosis.reading.crash_stack import MOST, crash_stack

CRASH = str(PROGRAMS / "diagnosis" / "deep_crash.py")


def test_the_crashed_threads_innermost_frames_are_found():
    done = subprocess.run([sys.executable, CRASH, str(MOST)], capture_output=True, check=False)
    found = crash_stack(log_reader.read((b"step 1\n", done.stderr, b"end\n")).lines, None)
    assert found == (
        frame(CRASH, "line 14 in deep"),
        *[frame(CRASH, "line 12 in deep")] * (MOST - 1),
    )


TWO = b"""[rank1]: Fatal Python error: Aborted
[rank1]: Current thread 0x00007f (most recent call first):
[rank1]:   File "other.py", line 3 in other
[rank0]: Fatal Python error: Segmentation fault
[rank0]: Thread 0x00007e (most recent call first):
[rank0]:   File "wait.py", line 2 in wait
[rank0]: Current thread 0x00007f [python] (most recent call first):
[rank0]: saving
[rank0]:   File "train.py", line 7 in step
[rank0]: Thread 0x00007d (most recent call first):
[rank0]:   File "late.py", line 4 in late
"""


def test_the_stack_is_that_of_the_rank_that_is_asked_for():
    lines = log_reader.read((TWO,)).lines
    assert crash_stack(lines, 0) == ('File "train.py", line 7 in step',)
    assert crash_stack(lines, 1) == ('File "other.py", line 3 in other',)
    dump = b'Current thread 0x01 (most recent call first):\n  File "a.py", line 1 in f\n'
    assert crash_stack(log_reader.read((b"Fatal: no data\n", dump)).lines, None) == ()


def test_an_import_that_crashes_is_shown_with_who_imported():
    frames = ["241 in _call_with_frames_removed", "1233 in create_module", "676 in _load_unlocked"]
    rows = [f'  File "<frozen importlib._bootstrap>", line {frame}' for frame in frames]
    rows += ['  File "train.py", line 2 in <module>']
    head = [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x01 (most recent call first):",
    ]
    found = crash_stack(log_reader.read(("\n".join([*head, *rows, ""]).encode(),)).lines, None)
    assert found == tuple(rows[at].strip() for at in (0, 1, 3))
