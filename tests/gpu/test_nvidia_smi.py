"""What nvidia-smi prints, in the forms of its series, and what is left of it when a GPU is sick."""

from __future__ import annotations

import pytest
from fake_smi import bus, fields, report

from saferun.gpu import nvidia_smi

# How the sections of one driver series look, cut to what differs.
SERIES_550 = """\
==============NVSMI LOG==============

Timestamp                                 : Thu Nov 14 15:35:07 2024
Driver Version                            : 550.54.14
CUDA Version                              : 12.4

Attached GPUs                             : 1
GPU 00000000:AD:00.0
    Product Name                          : NVIDIA H100 NVL
    GPU Reset Status
        Reset Required                    : Yes
        Drain and Reset Recommended       : No
    Clocks Event Reasons
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
    Fabric
        State                             : N/A
        Health
            Bandwidth                     : N/A
    Processes                             : None

"""
SERIES_525 = """\
Driver Version                            : 525.147.05
CUDA Version                              : 12.0
GPU 00000000:3B:00.0
    Clocks Throttle Reasons
        HW Thermal Slowdown               : Active
"""


def test_a_report_of_two_gpus_is_read_field_by_field():
    read = nvidia_smi.parse(report([fields(0), fields(1)]))
    assert (read.driver, read.cuda) == ("580.95.05", "13.0")
    assert [card.bus for card in read.cards] == [bus(0), bus(1)]
    assert read.strange == ""
    for number, card in enumerate(read.cards):
        given = fields(number)
        del given["Processes"]  # nothing is read from there on
        assert {name: card.fields.get(name) for name in given} == given


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        (SERIES_550, "GPU Reset Status/Reset Required", "Yes"),
        (SERIES_550, "Clocks Event Reasons/HW Slowdown/HW Thermal Slowdown", "Active"),
        (SERIES_525, "Clocks Throttle Reasons/HW Thermal Slowdown", "Active"),
    ],
    ids=["reset status", "nested reason", "older section"],
)
def test_each_series_names_its_fields(text, name, value):
    assert nvidia_smi.parse(text).cards[0].get(name) == value


def test_newer_drivers_call_their_versions_otherwise():
    read = nvidia_smi.parse("KMD Version : 610.57.04\nCUDA UMD Version : 13.3\n")
    assert (read.driver, read.cuda) == ("610.57.04", "13.3")


@pytest.mark.parametrize("value", ["N/A", "[N/A]", "None", "Not Supported", "[Not Found]", ""])
def test_a_field_without_a_value_is_empty(value):
    card = nvidia_smi.Card(bus(0), {"ECC Mode/Current": value})
    assert card.get("ECC Mode/Current") == ""
    assert card.sick() == ()


@pytest.mark.parametrize("value", ["[GPU is lost]", "Unknown Error", "[Unknown Error]", "ERR!"])
def test_an_error_in_a_values_place_is_no_value(value):
    card = nvidia_smi.Card(bus(0), {"Fan Speed": "30 %", "FB Memory Usage/Used": value})
    assert card.get("FB Memory Usage/Used") == ""
    assert card.sick() == ("FB Memory Usage/Used",)


def test_processes_are_read_as_numbers():
    answer = "GPU-1, 71, 1024\nGPU-2, 72, [N/A]\nGPU-1, 73, 5\nGPU-1, evil, 1\nrubbish\n"
    assert nvidia_smi.parse_apps(answer) == {
        "GPU-1": (nvidia_smi.Process(71, 1024), nvidia_smi.Process(73, 5)),
        "GPU-2": (nvidia_smi.Process(72, None),),
    }


HEAD = f"x\nGPU 0000{bus(1).upper()}\n    GPU UUID : GPU-evil\n    GPU Recovery Action : Reset"
EVIL = {
    "a field of its own GPU": "x\n    GPU Recovery Action : Reset\n    Minor Number : 7",
    "a process": "x\n        Process ID : 1\n            Type : C",
    "a second GPU": HEAD,
    "an unknown GPU": HEAD.replace(bus(1).upper(), "0000:FF:00.0"),
    "a lost GPU": f"x\nUnable to determine the device handle for GPU1: {bus(1)}: GPU is lost",
    "control sequences": "x\x1b[31m\r\x9b2J\u202e",
}


@pytest.mark.parametrize("name", EVIL.values(), ids=EVIL)
@pytest.mark.parametrize("count", [1, 2])
def test_the_name_of_a_process_changes_nothing_in_a_report(name, count):
    cards = [{**fields(number), "Processes": ""} for number in range(count)]
    buses = [bus(number) for number in range(2)]
    plain = nvidia_smi.parse(report(cards, processes={0: [(71, "x", 5)]}), known=buses)
    read = nvidia_smi.parse(report(cards, processes={0: [(71, name, 5)]}), known=buses)
    assert len(plain.cards) == count
    assert read == plain or (read.forged and not read.cards)
    assert count == 2 or read == plain  # each GPU asked alone is always believed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (report([fields(0), fields(0)]), "a GPU is there twice"),
        (report([fields(0)]) + "    Minor Number : 7\n    Minor Number : 8\n", "`Minor Number`"),
        (report([fields(0), fields(1), fields(2)]), "no GPU of this machine"),
    ],
    ids=["a GPU", "a field", "an unknown GPU"],
)
def test_a_report_that_contradicts_itself_is_refused(text, why):
    read = nvidia_smi.parse(text.replace("    Processes ", "    Other "), known=[bus(0), bus(1)])
    assert (read.cards, why in read.forged) == ((), True), read.forged


@pytest.mark.parametrize(
    ("line", "address", "why"),
    [
        ("for GPU3: 0000:5F:00.0: Unknown Error", "0000:5f:00.0", "Unknown Error"),
        (
            "for GPU0000:25:00.0: GPU is lost.  Reboot it.",
            "0000:25:00.0",
            "GPU is lost.  Reboot it",
        ),
        ("for GPU 0000:01:00.0: Not Found", "0000:01:00.0", "Not Found"),
        ("for GPU2: Unknown Error", "", "Unknown Error"),
    ],
    ids=["number and address", "address", "blank and address", "number"],
)
def test_a_gpu_that_cannot_be_opened_is_named(line, address, why):
    read = nvidia_smi.parse(f"Unable to determine the device handle {line}\n{report([fields(0)])}")
    assert read.lost == (nvidia_smi.Lost(address, why),)
    assert len(read.cards) == 1


def test_a_lost_gpu_keeps_its_number():
    cards = [nvidia_smi.Card(bus(number), {}) for number in (0, 2)]
    assert nvidia_smi.ordered(cards, [nvidia_smi.Lost(bus(1), "")]) == {
        bus(0): 0,
        bus(1): 1,
        bus(2): 2,
    }


@pytest.mark.parametrize(
    "text", ["", "\0\x01\xff" * 100, "index, name\n0, H200\n", "GPU 0: NVIDIA H200 (UUID: x)\n"]
)
def test_what_is_no_report_has_no_gpus(text):
    read = nvidia_smi.parse(text)
    assert read.cards == ()
    assert (read.strange != "") is (text != "")
    assert read.strange.isprintable()


def test_a_report_that_is_cut_anywhere_gives_what_there_is():
    text = report([fields(0), fields(1)])
    for end in range(0, len(text), 97):
        assert len(nvidia_smi.parse(text[:end]).cards) <= 2


def test_capabilities_are_read_by_address_and_others_left_out():
    text = "00000000:1A:00.0, 9.0\nError, x\n00000000:1B:00.0, [N/A]\n1, 2, 3\n"
    assert nvidia_smi.parse_capabilities(text) == {bus(0): "9.0"}


PEERS = """\
 \tGPU0\tGPU1\t
 GPU0\tX\tCNS\t
 GPU1\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
"""


def test_peer_access_is_read_in_both_directions():
    assert nvidia_smi.parse_peers(PEERS) == {(0, 1): "CNS", (1, 0): "OK"}
    assert nvidia_smi.parse_peers("garbage GPU0\nGPU0 X X X\n") == {}


def test_links_that_are_up_are_counted():
    text = "GPU 0: H200 (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: y\n"
    assert nvidia_smi.parse_links(text) == {0: (1, 2)}


@pytest.mark.parametrize(
    ("text", "value"),
    [("143771 MiB", 143771), ("-3 MiB", None), ("N/A", None), ("", None), ("9" * 5000, 10**18 - 1)],
    ids=["memory", "negative", "none", "empty", "absurd"],
)
def test_a_number_is_what_a_value_begins_with(text, value):
    assert nvidia_smi.number(text) == value
