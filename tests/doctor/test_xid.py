"""The driver's events in a kernel log, by NVIDIA's catalogue."""

from __future__ import annotations

import pytest

from saferun.doctor import xid
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM

KNOWN = xid.catalogue({})
NUMBERS = {"0000:c1:00.0": 3}


def judged(*lines, well=()):
    return xid.judge(tuple(xid.parse(lines)), KNOWN, NUMBERS, well)


def line(code, text="pid=1234, name=python, something"):
    return f"[ 7.1] NVRM: Xid (PCI:0000:c1:00): {code}, {text}"


@pytest.mark.parametrize(
    ("text", "event"),
    [
        (line(79, "GPU has fallen off the bus."), ("0000:c1:00.0", 79, False)),
        ("NVRM: Xid (0000:03:00): 31, Ch 00000013, MMU Fault", ("0000:03:00.0", 31, False)),
        ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Fatal", ("0000:05:00.0", 12028, True)),
        ("NVRM: Xid (PCI:0000:06:00): 43", ("0000:06:00.0", 43, False)),
    ],
    ids=["today's", "before 300", "NVSwitch", "without a text"],
)
def test_each_form_of_a_line_is_read(text, event):
    (found,) = xid.parse([text])
    assert (found.bus, found.code, found.switch) == event


@pytest.mark.parametrize("text", ["", "NVRM: loading NVIDIA UNIX", "Xid 79 is bad, says a page"])
def test_other_lines_are_not_events(text):
    assert list(xid.parse([text])) == []


@pytest.mark.parametrize(
    ("code", "level", "blame"),
    [
        (13, NOTE, "application's fault"),
        (31, NOTE, "application's fault"),
        (43, NOTE, "application's fault"),
        (45, NOTE, "for information"),
        (48, PROBLEM, "hardware"),
        (63, NOTE, "hardware"),
        (64, PROBLEM, "hardware"),
        (74, PROBLEM, "hardware"),
        (79, PROBLEM, "hardware"),
        (94, NOTE, "hardware"),
        (95, PROBLEM, "hardware"),
        (119, PROBLEM, "driver"),
        (150, PROBLEM, "hardware"),
    ],
    ids=str,
)
def test_the_blame_for_an_event_follows_the_catalogue(code, level, blame):
    (found,) = judged(line(code))
    assert (found.level, found.area) == (level, "GPU 3")
    assert blame in found.what


def test_an_applications_fault_is_fixed_in_the_application():
    (found,) = judged(line(31))
    assert "not of the GPU" in found.fix


def test_equal_events_are_reported_once_with_their_count():
    (found,) = judged(*[line(48)] * 5)
    assert found.what.startswith("Xid 48, 5 times:")


def test_an_event_of_a_gpu_that_needs_no_recovery_is_a_note():
    (found,) = judged(line(48), well=["0000:c1:00.0"])
    assert found.level == NOTE
    assert "asks for nothing now" in found.detail


def test_the_recovery_that_the_driver_asked_for_is_reported():
    text = "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
    assert "Node Reboot Required" in judged(line(154, text))[0].what


def test_a_gpu_that_is_no_longer_there_is_named_by_its_address():
    (found,) = judged("NVRM: Xid (PCI:0000:0a:00): 79, pid=1")
    assert found.area == "GPU at 0000:0a:00.0"


def test_an_unknown_code_is_a_note():
    assert judged(line(999))[0].level == NOTE


@pytest.mark.parametrize(("text", "level"), [("Fatal, Link 3", PROBLEM), ("Non-fatal, x", NOTE)])
def test_an_nvswitchs_event_is_a_problem_where_it_is_fatal(text, level):
    (found,) = judged(f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, {text}")
    assert (found.level, found.area) == (level, "NVSwitch 0000:05:00.0")


def test_a_log_without_events_is_fine():
    assert [found.level for found in judged("NVRM: loading")] == [OK]


def test_the_catalogue_names_no_code_twice_and_knows_each_action():
    document = loader.load_xids({})
    codes = [code for row in document["xids"] for code in row["codes"]]
    assert len(codes) == len(set(codes))
    for row in document["xids"]:
        (found,) = judged(line(row["codes"][0]))
        assert found.what
        assert (found.level == PROBLEM) <= (found.fix != "")
