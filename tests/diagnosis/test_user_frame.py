"""Where the user's code was, and whose fault a traceback shows that is cut before its exception."""

import subprocess
import sys
from pathlib import Path

import pytest
from cases import check_cases
from job_logs import diagnose

from saferun.diagnosis.explaining import failure_report
from saferun.diagnosis.reading import user_frame

MAIN = '  File "/w/a.py", line 9, in main\n    {}\n'
OWN = '  File "/w/b.py", line 3, in f\n    x = y[3]\n'
CUT = '  File "/v/lib/python3.12/site-packages/{}'
TRACEBACKS = {
    "no frame": ("KeyError\n", ""),
    "a function of the script's": (OWN, "own"),
    "below a call that may pass": (MAIN.format("loss.backward()") + OWN, "own"),
    "a call that may pass": (MAIN.format("loss.backward()"), ""),
    "a call that hides more": (MAIN.format("torch.save(x)"), "likely"),
    "the script's own lines": (OWN.replace("in f", "in <module>"), "likely"),
    "a library that may pass": (OWN.replace("/w/", "/v/torch/utils/"), "likely"),
    "of it, what reaches a device": (OWN.replace("/w/", "/v/torch/nn/"), ""),
    "a boxed frame": ("/w/a.py:12 in f\n  x = y[3]\n", "own"),
    "cut in a library": (OWN + CUT.format("numpy/co"), "likely"),
    "cut in a library's name": (OWN + CUT.format("num"), "likely"),
    "cut in the name of one that may pass": (OWN + CUT.format("tor"), ""),
    "cut in one that may pass": (OWN + CUT.format("torch/_tens"), ""),
    "cut below a call that may pass": (MAIN.format("loss.backward()") + CUT.format("numpy/co"), ""),
    "cut in the first path": ('  File "/w/src/mo', "likely"),
}


@pytest.mark.parametrize(("text", "whose"), TRACEBACKS.values(), ids=TRACEBACKS)
def test_whose_fault_a_cut_traceback_shows(text, whose):
    assert user_frame.of_cut(text) == whose


# The script's lines, and what is shown of the innermost one.
RAISING = {
    "in the script": ("batch = {}\nbatch['labels']\n", "2  batch['labels']"),
    "in a library below it": ("import json\njson.loads(\n    'x',\n)\n", "2  json.loads("),
    "in a chain": (
        "def read(): {}['a']\ntry: read()\nexcept KeyError as error: raise OSError() from error\n",
        "1  def read(): {}['a']",
    ),
    "in text that has no file": ("exec('1 / 0')\n", "1  exec('1 / 0')"),
}


def is_shown(tmp_path: Path, source: str, shown: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(source, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    found = diagnose(done.stderr)
    assert found.user_frame == f"{script}:{shown}"
    assert failure_report.where(found) == [f"    at {script}:{shown}"]


def test_the_place_of_a_users_exception_is_shown_with_its_source(tmp_path):
    check_cases({name: (tmp_path, *case) for name, case in RAISING.items()}, is_shown)


def test_of_a_boxed_stack_the_line_that_failed_is_shown():
    box = """\
╭───────────────────── Traceback (most recent call last) ──────────────────────╮
│ /w/train.py:28 in step                                                       │
│                                                                              │
│   27 def step(batch):                                                        │
│ ❱ 28     x = batch["labels"]                                                 │
│   29                                                                         │
╰──────────────────────────────────────────────────────────────────────────────╯
KeyError: 'labels'
"""
    assert diagnose(box).user_frame == '/w/train.py:28  x = batch["labels"]'
