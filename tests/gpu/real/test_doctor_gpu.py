"""On a real GPU machine: what `saferun doctor` says of it.

Where $OUT is set, what nvidia-smi printed and what doctor made of it is kept there, for records.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

import pytest
from repo import PROGRAMS

from saferun.doctor import view as doctor_page
from saferun.doctor.collect import nvidia
from saferun.gpu import nvidia_smi
from saferun.model import Finding
from saferun.system import command as bounded
from saferun.system import gpus

ROOT = pathlib.Path(__file__).resolve().parents[3]
FACTS = gpus.detect({"PATH": os.environ.get("PATH", os.defpath)})
COUNT = len(FACTS.gpus)

pytestmark = pytest.mark.skipif(not COUNT, reason="no NVIDIA GPU here")
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")

QUESTIONS = {
    "q.txt": ("-q",),
    "q.xml": ("-q", "-x"),
    "p2p-read.txt": ("topo", "-p2p", "r"),
    "topo.txt": ("topo", "-m"),
    "nvlink.txt": ("nvlink", "-s"),
    "caps.txt": ("--query-gpu=pci.bus_id,compute_cap", "--format=csv,noheader"),
    "unknown-field.txt": ("--query-gpu=no_such_field", "--format=csv"),
    "no-such-gpu.txt": ("-q", "-i", "0000:ff:1f.0"),
    "help-query.txt": ("--help-query-gpu",),
}


def keep(name, text):
    if os.environ.get("OUT"):
        (pathlib.Path(os.environ["OUT"]) / name).write_text(text)


def doctor(*argv, **environ):
    """Run it; return its exit status and its JSON."""
    path = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    done = subprocess.run(
        [sys.executable, "-m", "saferun", "doctor", "--json", *argv],
        env={**os.environ, "PYTHONPATH": path, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    keep(f"doctor{'-'.join(['', *argv])}.txt", done.stdout + done.stderr)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def about(reported, area):
    return [f for f in reported["findings"] if f["area"].startswith(area)]


@pytest.fixture(scope="module")
def examined() -> tuple[int, dict[str, Any]]:
    return doctor()


@pytest.fixture(scope="module")
def printed() -> dict[str, bounded.Answer]:
    """What nvidia-smi says to each question; kept for records."""
    answers = {n: bounded.run(("nvidia-smi", *w), os.environ, 30) for n, w in QUESTIONS.items()}
    for name, answer in answers.items():
        keep(name, f"{answer.out}{answer.err}\nexit status {answer.status}\n")
    return answers


def test_the_report_is_read_whole(printed):
    report = nvidia_smi.parse(printed["q.txt"].out)
    assert [card.get("GPU UUID") for card in report.cards] == [g.uuid for g in FACTS.gpus]
    assert report.driver
    assert report.cuda
    assert report.lost == ()
    for card in report.cards:
        assert card.get("FB Memory Usage/Total").endswith("MiB")
        assert card.get("ECC Mode/Current") in ("Enabled", "Disabled", "")
        assert not card.sick()


def test_the_fields_that_doctor_judges_are_those_that_this_driver_has(printed):
    (card, *_) = nvidia_smi.parse(printed["q.txt"].out).cards
    asked = ("MIG Mode/Current", "Remapped Rows/Pending", "Compute Mode", "Persistence Mode")
    assert [name for name in asked if name not in card.fields] == []
    reasons = [name for name in card.fields if name.endswith("/HW Slowdown/HW Thermal Slowdown")]
    assert len(reasons) == 1


def test_capabilities_are_read_for_every_gpu(printed):
    known = {card.bus for card in nvidia_smi.parse(printed["q.txt"].out).cards}
    assert set(nvidia_smi.parse_capabilities(printed["caps.txt"].out)) == known


def test_a_question_that_the_driver_does_not_know_fails(printed):
    assert printed["unknown-field.txt"].status
    assert nvidia_smi.parse(printed["no-such-gpu.txt"].out).cards == ()


def test_the_machine_is_examined_within_doctors_own_limit(examined):
    reported = examined[1]
    assert not about(reported, "doctor"), reported["findings"]


def test_no_gpu_is_said_to_be_broken(examined):
    reported = examined[1]
    assert [f for f in about(reported, "GPU") if f["level"] == "problem"] == []


def test_torch_and_the_driver_fit(examined):
    fits = about(examined[1], "driver") + about(examined[1], "torch")
    assert {f["level"] for f in fits} <= {"ok", "note"}
    assert any("has code for GPUs" in f["what"] for f in fits)


def test_the_page_is_80_columns_wide(examined):
    page = doctor_page.render([Finding(**found) for found in examined[1]["findings"]])
    keep("page.txt", page)
    argv = [line for line in page.splitlines() if len(line) > 80]
    assert all("http" in line or len(line.split()) == 1 for line in argv), argv


@needs_two
def test_every_pair_of_gpus_is_tried_in_both_directions_and_three_ways(examined):
    pairs = examined[1]["facts"]["gpus"]["cuda"]["pairs"]
    keep("pairs.json", json.dumps(pairs, indent=1))
    assert len(pairs) == COUNT * (COUNT - 1)
    assert {pair["copy"] for pair in pairs} == {"ok"}
    direct = [pair for pair in pairs if pair["can"]]
    assert {(pair["read"], pair["write"]) for pair in direct} <= {("ok", "ok")}


def test_a_check_leaves_no_memory_taken():
    nvidia.ask_cuda(os.environ, 30)
    report = nvidia.ask_smi(os.environ, (), time.monotonic() + 30).report
    used = [nvidia_smi.number(card.get("FB Memory Usage/Used")) for card in report.cards]
    assert max(used) < 2000, used


def test_memory_that_another_process_holds_is_a_problem_of_that_gpu():
    total = nvidia_smi.number(
        nvidia.ask_smi(os.environ, (), time.monotonic() + 30)
        .report.cards[0]
        .get("FB Memory Usage/Total")
    )
    visible = FACTS.gpus[0].uuid
    holder = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "gpu" / "hold_memory.py"), str(total // 4)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": visible},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        status, reported = doctor()
        keep("doctor-held.json", json.dumps(reported, indent=1))
        taken = [f for f in about(reported, "GPU 0") if "taken already" in f["what"]]
        assert [f["level"] for f in taken] == ["problem"], reported["findings"]
        assert status == 1
    finally:
        holder.communicate("")


def test_full_measures_every_gpu():
    _, reported = doctor("--full")
    measured = reported["facts"]["measured"]
    assert measured["trouble"] == ""
    assert [speed["device"] for speed in measured["speeds"]] == list(range(COUNT))
    for speed in measured["speeds"]:
        assert speed["matmul_tflops"] > 20
        assert speed["memory_gbs"] > 200
    if COUNT > 1:
        assert measured["allreduce_trouble"] == ""
        assert measured["allreduce_gbs"] > 1


@needs_two
def test_a_gpu_that_another_job_slows_down_is_named():
    """A second program on one GPU takes time of it: that one falls behind its siblings."""
    busy = (
        "import torch\n"
        "a = torch.randn(8192, 8192, device='cuda', dtype=torch.float16)\n"
        "print('busy', flush=True)\n"
        "while True: a @ a; torch.cuda.synchronize()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", busy],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": FACTS.gpus[1].uuid},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "busy\n"
        _, reported = doctor("--full")
        keep("doctor-busy.json", json.dumps(reported, indent=1))
        slow = [f for f in reported["findings"] if "below the others" in f["what"]]
        # A transfer has two ends, so that the link of the idle GPU may fall behind, too.
        own = [f for f in slow if not f["what"].startswith("to the next GPU")]
        assert {f["area"] for f in own} == {"GPU 1"}
        assert any(f["what"].startswith("matmul") for f in own)
    finally:
        other.kill()
        other.communicate()
