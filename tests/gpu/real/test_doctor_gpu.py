"""On a real GPU machine: what `saferun doctor` says of it.

Where $OUT is set, what nvidia-smi prints and what doctor made of it is kept there, for records.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from repo import PROGRAMS

from saferun.doctor.collect import nvidia
from saferun.gpu import nvml
from saferun.system import command as bounded
from saferun.system import gpus

ROOT = pathlib.Path(__file__).resolve().parents[3]
FACTS = gpus.detect({"PATH": os.environ.get("PATH", os.defpath)})
COUNT = len(FACTS.gpus)

pytestmark = pytest.mark.skipif(not COUNT, reason="no NVIDIA GPU here")
needs_two = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")

# Fields that change from one second to the next
MOVING = ("Utilization", "Temperature", "GPU Power Readings/I", "Clocks Event Reasons", "FB Memory")
# What one of nvidia-smi's units is in ours
UNITS = {"": 1, "MiB": 1, "MHz": 1, "%": 1, "C": 1, "x": 1, "us": 1000, "W": 1000}


def keep(name, text):
    if os.environ.get("OUT"):
        (pathlib.Path(os.environ["OUT"]) / name).write_text(text, encoding="utf-8")


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


def printed_by_nvidia_smi() -> list[dict[str, str]]:
    """Return the fields of each GPU by section/name, as `nvidia-smi -q` prints them."""
    text = bounded.run(("nvidia-smi", "-q"), os.environ, 30).out
    keep("q.txt", text)
    cards: list[dict[str, str]] = []
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        depth = len(name) - len(name.lstrip())
        above = [*((d, n) for d, n in above if 0 < d < depth), (depth, name.strip())]
        if line.startswith("GPU 0"):
            cards.append({})
        elif colon and depth:
            cards[-1]["/".join(n for _, n in above)] = value.strip()
    return cards


@pytest.fixture(scope="module")
def asked() -> nvml.NvmlAnswer:
    return nvml.ask(os.environ, 30, health=True)


def test_nvml_answers_for_every_gpu(asked):
    report = asked.report
    assert (asked.trouble, asked.status, report.lost) == ("", 0, ())
    assert [card.get("GPU UUID") for card in report.cards] == [g.uuid for g in FACTS.gpus]
    assert report.driver == gpus.driver_version()
    assert report.cuda
    assert set(asked.capabilities) == {card.bus for card in report.cards}
    assert [card.sick for card in report.cards] == [()] * COUNT


def in_our_unit(printed: str) -> str | int:
    """Return what nvidia-smi prints as ask_nvml.py has it."""
    number, unit = re.fullmatch(r"([\d.]*) ?(.*)", printed).groups()
    return round(float(number) * UNITS[unit]) if number and unit in UNITS else printed


def test_fields_have_the_names_texts_and_numbers_of_nvidia_smi(asked):
    for card, printed in zip(asked.report.cards, printed_by_nvidia_smi(), strict=True):
        ours = card.fields
        assert [name for name in ours if name not in printed] == []
        theirs = {name: in_our_unit(printed[name]) for name in ours}
        fixed = {name: value for name, value in ours.items() if not name.startswith(MOVING)}
        assert fixed == {name: theirs[name] for name in fixed}
        kinds = {name: type(value) for name, value in ours.items()}
        assert kinds == {name: type(value) for name, value in theirs.items()}


@needs_two
def test_every_pair_and_every_link_is_told(asked):
    assert len(asked.peers) == COUNT * (COUNT - 1)
    text = bounded.run(("nvidia-smi", "nvlink", "-s"), os.environ, 30).out
    assert sum(of for _, of in asked.links.values()) == text.count(" Link ")


def test_a_whole_machine_has_no_problem_of_its_gpus_and_torch_fits_its_driver(examined):
    reported = examined[1]
    assert not about(reported, "doctor"), reported["findings"]
    assert [f for f in about(reported, "GPU") if f["level"] == "problem"] == []
    fits = about(reported, "driver") + about(reported, "torch")
    assert {f["level"] for f in fits} <= {"ok", "note"}
    assert any("has code for GPUs" in f["what"] for f in fits)


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
    report = nvidia.ask_nvml(os.environ, (), time.monotonic() + 30).report
    used = [card.number("FB Memory Usage/Used") for card in report.cards]
    assert max(used) < 2000, used


def test_memory_that_another_process_holds_is_a_problem_of_that_gpu():
    card = nvidia.ask_nvml(os.environ, (), time.monotonic() + 30).report.cards[0]
    total = card.number("FB Memory Usage/Total")
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
