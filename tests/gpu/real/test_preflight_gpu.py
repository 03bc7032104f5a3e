"""The test of the GPUs on a machine that has some: the real driver, real memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from saferun.gpu.preflight import preflight, preflight_gate, preflight_report
from saferun.model import GpuFacts
from saferun.system import gpus

ROOT = Path(__file__).resolve().parents[3]
ENVIRON = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
FACTS = gpus.detect(ENVIRON)

pytestmark = pytest.mark.skipif(not FACTS.gpus, reason="no NVIDIA GPU here")

# Takes nearly all memory of GPU 0 and says so.
HOARDER = """
import torch
free, _ = torch.cuda.mem_get_info(0)
keep = torch.empty(free - (96 << 20), dtype=torch.uint8, device="cuda:0")
torch.cuda.synchronize()
print("full", flush=True)
input()
"""


def tried(**environ: str) -> dict:
    with preflight.PreflightTest({**ENVIRON, **environ}) as test:
        return test.report(60)


def test_every_gpu_passes():
    reported = tried()
    assert preflight.is_well(reported), reported
    assert len(reported["devices"]) == len(FACTS.gpus)


def test_the_names_are_those_of_nvidia_smi():
    argv = ["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"]
    messages = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    pairs = {tuple(line.split(", ")) for line in messages.splitlines()}
    expected = {(uuid, re.sub(r"^0000(?=\w{4}:)", "", bus.lower())) for uuid, bus in pairs}
    assert {(d["uuid"], d["pci"]) for d in tried()["devices"].values()} == expected
    assert set(gpus.addresses().items()) <= expected  # of the driver's files, where there are some
    last = FACTS.gpus[-1].uuid
    (device,) = tried(CUDA_VISIBLE_DEVICES=last)["devices"].values()
    assert device["uuid"] == last


@pytest.mark.parametrize("visible", ["99", "", "GPU-ffffffff"])
def test_a_value_that_names_no_gpu_is_a_finding(visible):
    reported = tried(CUDA_VISIBLE_DEVICES=visible)
    (finding,) = preflight_report.judge(reported, GpuFacts(), 20).findings
    assert finding.level == "problem"
    assert repr(visible) in finding.fix


def test_a_gpu_that_is_full_is_named_with_its_holder():
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOARDER], env=ENVIRON, stdin=pipe, stdout=pipe, text=True
    ) as hoarder:
        if hoarder.stdout.readline() != "full\n":
            pytest.skip("no torch that can use the GPU")
        with preflight.PreflightTest(ENVIRON) as test:
            judged = preflight_gate.examine(test, ENVIRON, FACTS, 20)
        hoarder.communicate("\n")
    print(*judged.findings, sep="\n")
    assert not judged.well
    assert "CUDA_ERROR_OUT_OF_MEMORY (2)" in judged.findings[0].what
    assert set(judged.asks) == {"leftovers", "drain"}


def test_a_launch_under_require_runs_on_good_gpus(tmp_path):
    (tmp_path / "job.py").write_text("print('the job runs', flush=True)\n", encoding="utf-8")
    argv = ["--profile", "cuda", "--set", "preflight.mode=require", "--nproc-per-node", "1"]
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    done = subprocess.run(
        [sys.executable, "-m", "saferun", "--run-dir", str(tmp_path / "runs"), *argv, "job.py"],
        env={**ENVIRON, "PYTHONPATH": path, "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "the job runs\n"), done.stderr
    (log,) = tmp_path.glob("runs/*/events.jsonl")
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [e["granted"] for e in events if e["event"] == "preflight"] == [True]
