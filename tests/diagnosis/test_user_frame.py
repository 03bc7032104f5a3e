"""Whose fault a traceback shows that is cut before its exception."""

from __future__ import annotations

import pytest

from saferun.diagnosis import user_frame

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
