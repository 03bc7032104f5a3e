"""`doctor --full`: what was measured is compared with the siblings; what was not says why."""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import replace

import pytest

from saferun.doctor import full
from saferun.doctor.checks import checks_speed
from saferun.doctor.vitals import Measured, Speed
from saferun.model import NOTE, OK, PROBLEM
from saferun.system import command as bounded


def speeds(*matmul, **changed):
    made = [
        Speed(n, f"0000:{n:02x}:00.0", "NVIDIA H200", value, 4000.0, 380.0)
        for n, value in enumerate(matmul)
    ]
    return tuple(replace(speed, **changed.get(f"gpu{speed.device}", {})) for speed in made)


def judged(measured, numbers=None, linked=True):
    found = list(checks_speed.judge(measured, numbers or {}, linked))
    return [(f.level, f.area) for f in found], [f.what for f in found]


def test_gpus_of_one_speed_are_fine():
    levels, clause = judged(Measured(speeds(600, 610, 605, 598), allreduce_gbs=450))
    assert set(levels) == {(OK, "speed")}
    assert "matmul: 598 to 610 TFLOP/s (float16)" in clause
    assert any("all-reduce" in text and "450 GB/s" in text for text in clause)


def test_one_more_than_10_percent_below_its_siblings_is_named():
    for values, slow in (
        ((600, 600, 600, 500), ["GPU 3"]),
        ((600, 600, 600, 545), []),
        ((600, 480, 600, 500, 600), ["GPU 1", "GPU 3"]),
        ((600, 500), ["GPU 1"]),
        ((600,), []),
    ):
        levels, _ = judged(Measured(speeds(*values)))
        assert [area for level, area in levels if level == PROBLEM] == slow
    levels, _ = judged(Measured(speeds(600, 300, 600)), {"0000:01:00.0": 5})
    assert (PROBLEM, "GPU 5") in levels  # as nvidia-smi counts
    mixed = speeds(600, 300, gpu1={"name": "NVIDIA L4", "memory_gbs": 250.0})
    assert {level for level, _ in judged(Measured(mixed))[0]} == {OK}


def test_slow_memory_and_a_slow_link_are_named_too():
    known = speeds(600, 600, 600, gpu0={"memory_gbs": 2000.0}, gpu1={"peer_gbs": 20.0})
    levels, clause = judged(Measured(known))
    assert [area for level, area in levels if level == PROBLEM] == ["GPU 0", "GPU 1"]
    assert any("50 % below" in text for text in clause)
    levels, _ = judged(Measured(known), linked=False)  # PCI Express
    assert [area for level, area in levels if level in (PROBLEM, NOTE)] == ["GPU 0", "GPU 1"]
    assert (NOTE, "GPU 1") in levels


@pytest.mark.parametrize(
    "measured",
    [
        Measured(trouble="it did not end within 30 s"),
        Measured(speeds(600, 600, gpu1={"error": "OutOfMemoryError: x"})),
        Measured(speeds(600, 600), allreduce_trouble="exit status 1"),
    ],
    ids=["nothing", "a GPU that failed", "the all-reduce"],
)
def test_what_could_not_be_measured_is_a_problem(measured):
    assert PROBLEM in {level for level, _ in judged(measured)[0]}


def lines(*reported):
    return "".join(json.dumps(clause) + "\n" for clause in reported)


def test_the_measurements_are_combined_for_each_gpu():
    text = lines(
        {"device": 1, "name": "B", "bus": "0000:01:00.0", "matmul_tflops": 2.0, "memory_gbs": 3.0},
        {"device": 0, "name": "A", "matmul_tflops": 1.0},
        {"device": 1, "peer_gbs": 4.0},
        {"done": True},
    )
    read = full.read_alone(bounded.Answer("noise\n" + text, "", 0, ""))
    assert read.trouble == ""
    assert read.speeds[1] == Speed(1, "0000:01:00.0", "B", 2.0, 3.0, 4.0)
    assert read.speeds[0].name == "A"


def test_measurements_before_a_crash_are_kept_with_the_reason():
    text = lines({"device": 0, "name": "A", "matmul_tflops": 1.0})
    err = "RuntimeError: CUDA error: the launch timed out\nmore\n"
    read = full.read_alone(bounded.Answer(text, err, -6, "killed by SIGABRT"))
    assert len(read.speeds) == 1
    assert read.trouble == "killed by SIGABRT: RuntimeError: CUDA error: the launch timed out"


def test_the_all_reduce_must_succeed_with_the_right_sums():
    for reported, status, speed, trouble in (
        ([(5.0, True), (4.0, True)], 0, 4.0, ""),  # the slowest rank's
        ([(5.0, False)], 0, 0.0, "it gave wrong sums"),
        ([], 0, 0.0, "no answer"),
        ([(5.0, True)], 1, 0.0, "exit status 1"),
    ):
        out = lines(*({"allreduce_gbs": gbs, "right": right} for gbs, right in reported))
        answer = bounded.Answer(out, "", status, f"exit status {status}" if status else "")
        read = full.read_together(Measured(), answer)
        assert (read.allreduce_gbs, read.allreduce_trouble) == (speed, trouble)


def test_without_torchrun_there_is_only_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr("saferun.planning.torchrun.torchrun_install._torch_in", lambda folders: "")
    assert "no torchrun" in full.measure({"PATH": str(tmp_path)}, 2).trouble


def test_the_program_imports_torch_and_not_the_modules_beside_it(tmp_path):
    """Python puts a program's own folder first, and torch imports modules by many names."""
    program = tmp_path / "measure.py"
    program.write_bytes(pathlib.Path(full.PROGRAM).read_bytes())
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')", encoding="utf-8")
    clean = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""}
    clause = [sys.executable, program, "alone"]
    done = subprocess.run(clause, env=clean, capture_output=True, text=True)
    assert json.loads(done.stdout or "{}") == {"done": True, "gpus": 0}, done.stderr


def test_variables_that_configure_torchrun_are_removed_for_the_measurement():
    given = {"PET_NNODES": "2", "SAFERUN_INJECT": "{}", "MASTER_PORT": "1", "HOME": "/h"}
    assert full._environment(given) == {"HOME": "/h", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    kept = {"CUDA_VISIBLE_DEVICES": "1"}
    assert full._environment(kept) == kept
