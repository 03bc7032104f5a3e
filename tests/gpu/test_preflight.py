"""The program that tests the GPUs: against a driver that fails in every way.

The driver is a small library of C (fakes/libcuda.c) that is loaded as the real one would be;
everything else is real.
"""

import ast
import os
import signal
import subprocess
import sys
import uuid as unique
from pathlib import Path

import pytest
from cases import with_limits
from fakecuda import A, B, try_gpus
from helpers import MARK, living, until

from saferun.gpu.preflight import preflight


def test_good_gpus_are_named_with_uuid_and_pci_address(library):
    reported = try_gpus(library)
    assert (reported["well"], reported["ended"]) == (True, "done")
    known = [(d["good"], d["uuid"], d["pci"]) for d in reported["devices"].values()]
    assert known == [(True, A, "0000:1a:00.0"), (True, B, "0000:1b:00.0")]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("context", 46),
        ("memory", 2),
        ("write", 719),
        ("copy", 999),
        ("read", 214),
        ("release", 700),
    ],
)
def test_a_call_that_fails_on_one_gpu_is_told_with_its_step(library, call, code):
    reported = try_gpus(library, FAKE_CUDA_BAD=f"1:{call}:{code}")
    good, bad = reported["devices"]["0"], reported["devices"]["1"]
    assert good["good"] is True
    assert (bad["good"], bad["step"], bad["code"]) == (False, call, code)
    assert not reported["well"]


def test_a_driver_that_hangs_is_killed_in_time(library):
    mark = unique.uuid4().hex

    def tried(limit_s):
        return try_gpus(library, timeout_s=limit_s, FAKE_CUDA_INIT="hang", **{MARK: mark})

    reported = with_limits(tried, lambda reported: reported["step"] == "init")
    assert (reported["ended"], reported["step"]) == ("timeout", "init")
    assert not living(mark)


def test_one_gpu_that_hangs_does_not_hide_the_others(library):
    bad = {"FAKE_CUDA_GPUS": "3", "FAKE_CUDA_BAD": "1:context:hang"}
    reported = with_limits(
        lambda limit_s: try_gpus(library, timeout_s=limit_s, **bad),
        lambda reported: (
            [d.get("good") for d in reported["devices"].values()] == [True, None, True]
        ),
    )
    assert reported["devices"]["1"]["step"] == "context"


@pytest.mark.parametrize(
    ("behaviour", "reported"),
    [
        ({"FAKE_CUDA_INIT": "crash"}, {"ended": "crash", "signal": signal.SIGABRT, "step": "init"}),
        ({"library": "none"}, {"ended": "done", "step": "end", "well": False}),
        ({"FAKE_CUDA_BAD": "0:read:garbage"}, {"ended": "done", "well": False}),
    ],
    ids=["crash", "no library", "a wrong bit"],
)
def test_a_driver_that_is_broken_is_told(library, tmp_path, behaviour, reported):
    if behaviour.pop("library", ""):
        (tmp_path / "libcuda.so.1").write_text("not a library", encoding="utf-8")
        library = tmp_path
    found = try_gpus(library, **behaviour)
    assert found.items() >= reported.items()
    if library == tmp_path:
        assert "libcuda.so.1" in found["missing"]
    elif found["devices"]:
        (bad, *_) = found["devices"].values()
        assert (bad["good"], bad["step"], bad["differs_at"]) == (False, "compare", 4711)


@pytest.mark.parametrize("count", ["-3", "100000", "0"])
def test_a_driver_that_lies_about_its_count_is_no_traceback(library, count):
    reported = try_gpus(library, FAKE_CUDA_GPUS=count)
    assert (reported["ended"], reported["output"], reported["well"]) == ("done", "", False)
    assert not reported["devices"]


def test_the_test_ends_with_the_process_that_started_it(library, tmp_path):
    mark, log = unique.uuid4().hex, tmp_path / "log"
    code = "import os; from saferun.gpu.preflight.preflight import PreflightTest as Test"
    argv = [sys.executable, "-c", f"{code}; Test(os.environ).report(60)"]
    env = {"LD_LIBRARY_PATH": str(library), "FAKE_CUDA_INIT": "hang", MARK: mark}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    env["FAKE_CUDA_LOG"] = str(log)
    parent = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL)
    until(log.exists)  # in cuInit: it will not write to a pipe that nobody reads
    parent.kill()
    parent.wait()
    until(lambda: not living(mark))


def test_the_program_needs_nothing_newer_than_python_3_9():
    ast.parse(Path(preflight.__file__).read_text(encoding="utf-8"), feature_version=(3, 9))
