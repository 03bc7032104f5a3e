"""What NVML answers as values, and what is left of it when a GPU, the driver or the child fails."""

import json
import os
import subprocess
import sys

import pytest
from fake_nvml import MIB, UNKNOWN, Nvml, asking, bus, gpu
from fakecuda import compiled, uuid
from helpers import is_alive, until
from sandbox import captured

from saferun.gpu import nvml
from saferun.system.command import Answer


@pytest.fixture
def library(tmp_path) -> Nvml:
    return Nvml(tmp_path / "nvml")


def asked(library, **options) -> nvml.NvmlAnswer:
    return nvml.ask({"LD_LIBRARY_PATH": str(library.folder)}, 300, **options)


def test_every_field_has_the_name_of_nvidia_smi(library):
    library.reports(gpu(0), gpu(1))
    answer = asked(library, health=True)
    assert (answer.trouble, answer.status) == ("", 0)
    assert (answer.report.driver, answer.report.cuda) == ("580.95.05", "13.0")
    assert [(card.bus, card.place) for card in answer.report.cards] == [(bus(0), 0), (bus(1), 1)]
    fields = answer.report.cards[0].fields  # those of `nvidia-smi -q`: tests/gpu/real compares all
    assert fields["GPU UUID"] == uuid(0)
    assert fields["MIG Mode/Pending"] == "Disabled"
    assert fields["FB Memory Usage/Used"] == 3
    assert fields["ECC Errors/Volatile/SRAM Uncorrectable SEC-DED"] == 0
    assert fields["Clocks Event Reasons Counters/HW Thermal Slowdown"] == 0
    assert fields["GPU Power Readings/Current Power Limit"] == 700000  # mW
    assert fields["PCI/GPU Link Info/Link Width/Current"] == 16
    assert fields["Fabric/Health/Summary"] == "Healthy"
    state = asked(library).report.cards[0].fields
    assert (len(state), state.items() <= fields.items()) == (13, True)
    assert answer.capabilities == {bus(0): "9.0", bus(1): "9.0"}


def test_an_error_in_a_values_place_is_no_value(library):
    held = f"71 {1024 * MIB} 72 {UNKNOWN}"
    broken = {"GetMemoryInfo_v2": "!15", "GetTemperatureV": "!999"}
    library.reports(
        gpu(0, GetComputeRunningProcesses_v3=held, **broken),
        gpu(1, GetTemperatureV="!13", GetTemperature="91"),  # an older driver
    )
    (card, other) = asked(library).report.cards
    assert (other.load().celsius, other.sick) == (91, ())
    assert card.processes == (nvml.Process(71, 1024), nvml.Process(72, None))
    memory = [f"FB Memory Usage/{part}" for part in ("Total", "Reserved", "Free", "Used")]
    assert card.sick == (*memory, "Temperature/GPU Current Temp")
    assert card.fields["FB Memory Usage/Used"] == "GPU is lost"
    assert card.get("FB Memory Usage/Used") == ""
    assert card.load() == nvml.Load(0, 0, None, None, None)


def test_a_driver_without_most_functions_still_answers(tmp_path):
    source = tmp_path / "old.c"
    source.write_text(
        "int nvmlInit_v2(void) { return 0; }\n"
        "int nvmlDeviceGetCount_v2(unsigned *n) { *n = 1; return 0; }\n"
        "int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **d) { *d = d; return (int)n; }\n",
        encoding="utf-8",
    )
    folder = compiled(tmp_path, source, nvml.LIBRARY)
    answer = nvml.ask({"LD_LIBRARY_PATH": str(folder)}, 300, health=True)
    assert (answer.trouble, len(answer.report.cards)) == ("", 1)
    assert answer.report.cards[0].fields == {}


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
    whole = captured(*nvml.COMMAND, env={"LD_LIBRARY_PATH": str(library.folder)}).stdout
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
