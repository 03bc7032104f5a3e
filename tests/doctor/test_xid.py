"""The driver's events in a kernel log, by NVIDIA's catalogue."""

import pytest

from saferun.doctor import xid
from saferun.knowledge import loader
from saferun.model import NOTE, OK, PROBLEM

KNOWN = xid.catalogue()
NUMBERS = {"0000:c1:00.0": 3}


def judged(*lines, well=()):
    return xid.judge(tuple(xid.parse(lines)), KNOWN, NUMBERS, well)


def line(code, text="pid=1234, name=python, something"):
    return f"[ 7.1] NVRM: Xid (PCI:0000:c1:00): {code}, {text}"


FORMS = {
    line(79, "GPU has fallen off the bus."): ("0000:c1:00.0", 79, False),
    "NVRM: Xid (0000:03:00): 31, Ch 00000013, MMU Fault": ("0000:03:00.0", 31, False),  # before 300
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Fatal": ("0000:05:00.0", 12028, True),
    "NVRM: Xid (PCI:0000:06:00): 43": ("0000:06:00.0", 43, False),
}


def test_each_form_of_a_line_is_read_and_no_other():
    found = [(event.bus, event.code, event.switch) for event in xid.parse(FORMS)]
    assert found == list(FORMS.values())
    assert not list(xid.parse(["", "NVRM: loading NVIDIA UNIX", "Xid 79 is bad, says a page"]))
    assert [found.level for found in judged("NVRM: loading")] == [OK]


BLAMED = {
    "application's fault": {13: NOTE, 31: NOTE, 43: NOTE},
    "for information": {45: NOTE},
    "hardware": {
        48: PROBLEM,
        63: NOTE,
        64: PROBLEM,
        74: PROBLEM,
        79: PROBLEM,
        94: NOTE,
        150: PROBLEM,
    },
    "driver": {119: PROBLEM},
    "not in the catalogue": {999: NOTE},
}


def test_the_blame_for_an_event_follows_the_catalogue():
    for blame, codes in BLAMED.items():
        for code, level in codes.items():
            (found,) = judged(line(code))
            assert (found.level, found.area, blame in found.what) == (level, "GPU 3", True), found
    assert "not of the GPU" in judged(line(31))[0].fix


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


@pytest.mark.parametrize(("text", "level"), [("Fatal, Link 3", PROBLEM), ("Non-fatal, x", NOTE)])
def test_an_nvswitchs_event_is_a_problem_where_it_is_fatal(text, level):
    (found,) = judged(f"nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, {text}")
    assert (found.level, found.area) == (level, "NVSwitch 0000:05:00.0")


def test_the_catalogue_names_no_code_twice_and_knows_each_action():
    document = loader.load("xid.yaml")
    codes = [code for row in document["xids"] for code in row["codes"]]
    assert len(codes) == len(set(codes))
    for row in document["xids"]:
        (found,) = judged(line(row["codes"][0]))
        assert found.what
        assert (found.level == PROBLEM) <= (found.fix != "")
