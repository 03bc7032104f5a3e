"""The report of `saferun doctor`: for people, in a terminal's width, and as JSON for programs."""

from __future__ import annotations

import json

from saferun.doctor import view
from saferun.doctor.collect import all_sources
from saferun.gpu import nvml
from saferun.model import NOTE, OK, PROBLEM, Finding

SAMPLE = [
    Finding(OK, "disk", "fine", "not shown", ""),
    Finding(NOTE, "GPU 0", "ECC is off", "", "switch it on"),
    Finding(NOTE, "GPU 1", "ECC is off", "", "switch it on"),
    Finding(NOTE, "GPU 3", "ECC is off", "", "switch it on"),
    Finding(PROBLEM, "GPU at 0000:1a:00.0", "gone " * 30, "why https://a.b/" + "c" * 90, "fix it"),
]


def test_the_report_has_problems_first_and_fits_80_columns():
    lines = view.render(SAMPLE).splitlines()
    assert lines[0] == "1 problem, 1 note, 1 fine"
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert titles == ["problems", "notes", "fine"]
    assert all(len(line) <= 80 or "https://" in line for line in lines)


def test_the_report_fits_a_narrow_terminal_as_far_as_it_can_be_read():
    sample = [Finding(NOTE, "limits", "few files " * 20, "", "more of them " * 9)]
    for columns, width in ((64, 64), (200, 80), (10, 50), (0, 50)):
        longest = max(map(len, view.render(sample, columns=columns).splitlines()))
        assert width - 10 < longest <= width


def test_a_command_to_copy_is_not_broken():
    fix = "end what runs on this GPU, then as root `nvidia-smi --gpu-reset -i 3`, or reboot"
    lines = view.render([Finding(PROBLEM, "GPU 3", "it hangs", "", fix)]).splitlines()
    assert any("`nvidia-smi --gpu-reset -i 3`" in line for line in lines), lines


def test_equal_findings_of_several_gpus_are_reported_once():
    areas = [finding.area for finding in view.merged(SAMPLE)]
    assert areas == ["disk", "GPU 0-1, 3", "GPU at 0000:1a:00.0"]


def test_the_report_of_a_machine_without_a_problem_is_short():
    assert view.render(SAMPLE[:1]).splitlines()[0] == "all 1 checks are fine"


def test_colour_is_for_terminals():
    assert "\033[" in view.render(SAMPLE, colour=True)
    assert "\033[" not in view.render(SAMPLE)


def test_every_fact_becomes_json():
    facts = all_sources.Vitals(gpus=all_sources.Gpus(nvml.Answer(peers={(0, 1): "OK"})))
    document = json.loads(json.dumps(view.as_json(SAMPLE, facts)))
    assert document["facts"]["gpus"]["smi"]["peers"] == {"0 to 1": "OK"}
    assert document["findings"][0]["level"] == "ok"
