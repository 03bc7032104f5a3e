"""The report of `saferun doctor`: for people, in a terminal's width, and as JSON for programs."""

import json

from saferun.doctor import view
from saferun.doctor.collect import all_sources
from saferun.gpu import nvml
from saferun.model import NOTE, OK, PROBLEM, Finding

FIX = "end what runs on this GPU, then as root `nvidia-smi --gpu-reset -i 3`, or reboot"
SAMPLE = [
    Finding(OK, "disk", "fine", "not shown", ""),
    Finding(NOTE, "GPU 0", "ECC is off", "", "switch it on"),
    Finding(NOTE, "GPU 1", "ECC is off", "", "switch it on"),
    Finding(NOTE, "GPU 3", "ECC is off", "", "switch it on"),
    Finding(PROBLEM, "GPU at 0000:1a:00.0", "gone " * 30, "why https://a.b/" + "c" * 90, FIX),
]


def test_the_report_has_problems_first_and_fits_80_columns():
    lines = view.render(SAMPLE).splitlines()
    assert lines[0] == "1 problem, 1 note, 1 fine"
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert titles == ["problems", "notes", "fine"]
    assert all(len(line) <= 80 or "https://" in line for line in lines)
    assert any(line.startswith("  GPU 0-1, 3  ") for line in lines), "equal ones, once"
    assert any("`nvidia-smi --gpu-reset -i 3`" in line for line in lines), "to be copied"
    assert view.render(SAMPLE[:1]).splitlines()[0] == "all 1 checks are fine"
    assert ("\033[" in view.render(SAMPLE, colour=True), "\033[" in view.render(SAMPLE)) == (
        True,
        False,
    )


def test_every_fact_becomes_json():
    facts = all_sources.Vitals(gpus=all_sources.Gpus(nvml.NvmlAnswer(peers={(0, 1): "OK"})))
    document = json.loads(json.dumps(view.as_json(SAMPLE, facts)))
    assert document["facts"]["gpus"]["smi"]["peers"] == {"0 to 1": "OK"}
    assert document["findings"][0]["level"] == "ok"
