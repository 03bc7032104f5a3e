"""Guards where they matter: the error is Python's, and the CUDA context still works."""

import pytest
from repo import source

FAULTS = ["label", "token"]
PROGRAM = source("gpu/wrong_index")
GUARDS = ("--set", "hooks.guards.labels=on", "--set", "hooks.guards.embeddings=on")


@pytest.mark.parametrize("fault", FAULTS)
def test_the_error_is_pythons_and_the_context_works_after_it(gpus, saferun, fault):
    done = saferun(PROGRAM, *GUARDS, FAULT=fault, CAUGHT="yes", COMPILED="")
    assert done.code == 0, done.err[-3000:]
    (reported,) = done.reported
    assert "10, 11, 12" in reported["error"]
    assert reported["after"] == 2.0


@pytest.mark.parametrize("compiled", ["", "yes"], ids=["eager", "compiled"])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_diagnosing_attempt_names_the_line_and_the_values(gpus, saferun, fault, compiled):
    last = ("--set", "retry.debug_last=true")
    done = saferun(PROGRAM, *last, FAULT=fault, CAUGHT="", COMPILED=compiled)
    assert done.code == 1
    assert "device-side-assert" in done.err
    assert "10, 11, 12" in done.err.split("the run failed")[1]
