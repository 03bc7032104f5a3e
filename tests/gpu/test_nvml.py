"""What NVML answers as values, and what is left of it when a GPU, the driver or the child fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_nvml import MIB, UNKNOWN, Nvml, asking, bus, gpu
from fakecuda import compiled, uuid
from helpers import is_alive, until

from saferun.gpu import nvml
from saferun.system.command import Answer

WELL = {  # as `nvidia-smi -q` of an H200 has it, with driver 580
    "PCI/Bus Id": "00000000:1A:00.0",
    "Product Name": "NVIDIA H200",
    "GPU UUID": uuid(0),
    "Persistence Mode": "Enabled",
    "MIG Mode/Current": "Disabled",
    "MIG Mode/Pending": "Disabled",
    "GPU Recovery Action": "None",
    "FB Memory Usage/Total": "143771 MiB",
    "FB Memory Usage/Reserved": "620 MiB",
    "FB Memory Usage/Free": "143148 MiB",
    "FB Memory Usage/Used": "3 MiB",
    "Utilization/GPU": "0 %",
    "Temperature/GPU Current Temp": "32 C",
    "Compute Mode": "Default",
    "ECC Mode/Current": "Enabled",
    "ECC Mode/Pending": "Enabled",
    "ECC Errors/Volatile/SRAM Uncorrectable Parity": "0",
    "ECC Errors/Volatile/SRAM Uncorrectable SEC-DED": "0",
    "ECC Errors/Volatile/DRAM Uncorrectable": "0",
    "ECC Errors/Aggregate/SRAM Uncorrectable Parity": "0",
    "ECC Errors/Aggregate/SRAM Uncorrectable SEC-DED": "0",
    "ECC Errors/Aggregate/DRAM Uncorrectable": "0",
    "ECC Errors/Aggregate/SRAM Threshold Exceeded": "No",
    "ECC Errors/Channel Repair Pending": "No",
    "ECC Errors/TPC Repair Pending": "No",
    "Remapped Rows/Correctable Error": "0",
    "Remapped Rows/Uncorrectable Error": "0",
    "Remapped Rows/Pending": "No",
    "Remapped Rows/Remapping Failure Occurred": "No",
    "Clocks/SM": "1980 MHz",
    "Max Clocks/SM": "1980 MHz",
    "Clocks Event Reasons/HW Slowdown": "Not Active",
    "Clocks Event Reasons/HW Slowdown/HW Thermal Slowdown": "Not Active",
    "Clocks Event Reasons/HW Slowdown/HW Power Brake Slowdown": "Not Active",
    "Clocks Event Reasons/SW Thermal Slowdown": "Not Active",
    "Clocks Event Reasons/SW Power Cap": "Not Active",
    "Clocks Event Reasons Counters/HW Thermal Slowdown": "0 us",
    "Clocks Event Reasons Counters/HW Power Braking": "0 us",
    "GPU Power Readings/Instantaneous Power Draw": "76.10 W",
    "GPU Power Readings/Current Power Limit": "700.00 W",
    "PCI/GPU Link Info/Link Width/Max": "16x",
    "PCI/GPU Link Info/Link Width/Current": "16x",
    "Fabric/State": "Completed",
    "Fabric/Status": "Success",
    "Fabric/Health/Summary": "Healthy",
}


@pytest.fixture
def library(tmp_path) -> Nvml:
    return Nvml(tmp_path / "nvml")


def asked(library, **options) -> nvml.Answer:
    return nvml.ask({"LD_LIBRARY_PATH": str(library.folder)}, 300, **options)


def test_every_field_has_the_name_and_the_text_of_nvidia_smi(library):
    library.reports(gpu(0), gpu(1))
    answer = asked(library, health=True)
    assert (answer.trouble, answer.status) == ("", 0)
    assert (answer.report.driver, answer.report.cuda) == ("580.95.05", "13.0")
    assert [(card.bus, card.place) for card in answer.report.cards] == [(bus(0), 0), (bus(1), 1)]
    assert answer.report.cards[0].fields == WELL
    assert answer.capabilities == {bus(0): "9.0", bus(1): "9.0"}


def test_the_state_alone_is_the_same_in_fewer_questions(library):
    library.reports(gpu(0))
    (card,) = asked(library).report.cards
    assert card.fields == {name: WELL[name] for name in card.fields}
    assert len(card.fields) == 13


def test_an_error_in_a_values_place_is_no_value(library):
    library.reports(gpu(0, GetMemoryInfo_v2="!15", GetTemperatureV="!999"))
    (card,) = asked(library).report.cards
    memory = [f"FB Memory Usage/{part}" for part in ("Total", "Reserved", "Free", "Used")]
    assert card.sick == (*memory, "Temperature/GPU Current Temp")
    assert card.fields["FB Memory Usage/Used"] == "GPU is lost"
    assert card.get("FB Memory Usage/Used") == ""
    assert card.load() == nvml.Load(0, 0, None, None, None)


def test_an_older_driver_tells_the_temperature_by_another_function(library):
    library.reports(gpu(0, GetTemperatureV="!13", GetTemperature="91"))
    (card,) = asked(library).report.cards
    assert (card.load().celsius, card.sick) == (91, ())


def test_a_driver_without_most_functions_still_answers(tmp_path):
    source = tmp_path / "old.c"
    source.write_text(
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }\n"
        "int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **d) { *d = d; return (int)n; }\n"
    )
    folder = compiled(tmp_path, source, nvml.LIBRARY)
    answer = nvml.ask({"LD_LIBRARY_PATH": str(folder)}, 300, health=True)
    assert (answer.trouble, len(answer.report.cards)) == ("", 1)
    assert answer.report.cards[0].fields == {}


def test_processes_are_told_with_their_memory(library):
    held = f"71 {1024 * MIB} 72 {UNKNOWN}"
    library.reports(gpu(0, GetComputeRunningProcesses_v3=held))
    (card,) = asked(library).report.cards
    assert card.processes == (nvml.Process(71, 1024), nvml.Process(72, None))


def test_peer_access_is_told_in_both_directions_and_links_are_counted(library):
    library.reports(gpu(0, **{"GetP2PStatus.1.0": "1"}), gpu(1, GetNvLinkState="1 0 1"))
    answer = asked(library, health=True)
    assert answer.peers == {(0, 1): "CNS", (1, 0): "OK"}
    assert answer.links == {0: (2, 2), 1: (2, 3)}


def test_a_gpu_is_asked_alone_by_its_address(library):
    library.reports(gpu(0, GetName="hang"), gpu(1))
    (card,) = asked(library, bus=bus(1)).report.cards
    assert (card.bus, card.place) == (bus(1), 1)


def test_a_library_that_hangs_at_its_end_is_not_waited_for(library):
    library.reports(gpu(0), end="hang")
    assert asked(library).trouble == ""


def test_a_question_ends_with_the_process_that_asked(library):
    library.reports(Init_v2="hang")
    code = "from saferun.gpu import nvml; import os; nvml.ask(os.environ, 600)"
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library.folder)}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as process:
        until(lambda: library.asked, "it is asked")
        (child,) = asking(process.pid)
        process.kill()
    until(lambda: not is_alive(child), "the child is gone")


def test_an_answer_that_is_cut_anywhere_is_said_and_has_no_gpus(library):
    library.reports(gpu(0))
    whole = subprocess.run(
        nvml.COMMAND, env={"LD_LIBRARY_PATH": str(library.folder)}, capture_output=True, text=True
    ).stdout
    assert json.loads(whole)["cards"]
    for end in range(0, len(whole), 37):
        answer = nvml.read(Answer(whole[:end], "", 0, ""))
        assert (answer.report.cards, answer.trouble) == ((), "its answer is not complete")


@pytest.mark.parametrize("text", ["[]", "7", "{}", '{"cards": 7}', '{"cards": [{}], "count": 1}'])
def test_what_is_no_answer_is_said(text):
    answer = nvml.read(Answer(text, "\x1b[31mTraceback", 1, "exit status 1"))
    assert (answer.report.cards, answer.trouble) == ((), "exit status 1")
    assert "Traceback" in answer.message
    assert answer.message.isprintable()


@pytest.mark.parametrize(
    ("text", "value"),
    [("143771 MiB", 143771), ("-3 MiB", None), ("", None), ("9" * 5000, 10**18 - 1)],
    ids=["memory", "negative", "empty", "absurd"],
)
def test_a_number_is_what_a_value_begins_with(text, value):
    assert nvml.number(text) == value
