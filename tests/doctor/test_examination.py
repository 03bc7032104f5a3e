"""`saferun doctor` as a whole: real processes on machines whose nvidia-smi and libcuda are fakes.

Whatever these do (hang, lie, die), there are findings, no traceback, and an end within 20 s.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from fake_smi import bus, fields, libcuda, machine, program, report, uuid  # noqa: F401 - a fixture too

from saferun.doctor import examination as doctor
from saferun.doctor import together, vitals
from saferun.doctor import view as doctor_page
from saferun.model import NOTE, OK, PROBLEM, Finding
from saferun.system import command as bounded


class Desk:
    """A user's shell on a machine of our making."""

    def __init__(self, home, tmp_path, library):
        self.bin = tmp_path / "bin"
        self.bin.mkdir()
        self.cwd = tmp_path / "work"
        self.cwd.mkdir()
        self.library = library
        self.home = home
        torchrun = self.bin / "torchrun"  # a shim: torch is asked elsewhere
        torchrun.write_text("#!/bin/sh\nexit 1\n")
        torchrun.chmod(0o755)

    def environ(self, **changed):
        return {
            "HOME": str(self.home),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": str(self.library),
            **changed,
        }

    def examine(self, deadline_s=19.0, **environ):
        began = time.monotonic()
        found = doctor.examine(self.environ(**environ), str(self.cwd), deadline_s=deadline_s)
        self.seconds = time.monotonic() - began
        assert not any("fault of saferun" in f.what for f in found.findings), found.findings
        return found.findings

    def command(self, *words, **environ):
        return subprocess.run(
            [sys.executable, "-m", "saferun", "doctor", *words],
            env=self.environ(**environ),
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=40,
        )


@pytest.fixture
def desk(home, tmp_path, libcuda):  # noqa: F811
    return Desk(home, tmp_path, libcuda)


def ends(pid):
    """Say whether a process is gone within 5 s, or only waits to be reaped."""
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if stat.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


FLOOD = "head -c 64M /dev/zero; exec sleep 30"  # more than is taken, less than the memory


def about(findings, area):
    return [f for f in findings if f.area == area]


def problems(findings):
    return [f for f in findings if f.level == PROBLEM]


# --- a machine that is well


def test_a_machine_of_two_gpus_that_is_well_has_no_problem(desk):
    machine(desk.bin, report([fields(0), fields(1)]), 2)
    found = desk.examine()
    assert problems(found) == []
    assert [f.level for f in about(found, "GPU 0") + about(found, "GPU 1")] == [OK, OK]
    assert "2 transfers" in about(found, "peer to peer")[0].what
    assert "2 links up" in about(found, "NVLink")[0].what
    assert about(found, "CUDA") or about(found, "GPUs")


def test_the_command_prints_a_page_and_ends_with_1_where_there_is_a_problem(desk):
    machine(desk.bin, report([fields(0), fields(1)]), 2)
    done = desk.command(FAKE_CUDA_PEERS="0:1:copy:wrong")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[0].startswith("1 problem,")
    assert "GPU 0 to 1" in done.stdout
    assert "\033" not in done.stdout
    wide = [line for line in done.stdout.splitlines() if len(line) > 80]
    assert all(len(line.split()) == 1 for line in wide), wide  # a path or an address


@pytest.mark.parametrize(
    ("where", "status", "said"),
    [
        (">&-", 0, ""),
        ("--json >&-", 0, ""),
        ("> /dev/full", 69, "saferun: the output cannot be written: No space left on device"),
    ],
    ids=["closed", "json-closed", "full"],
)
def test_a_page_that_nobody_can_read_is_no_traceback(desk, where, status, said):
    script = f"{shlex.quote(sys.executable)} -m saferun doctor {where}"
    words = ["bash", "-c", script]
    done = subprocess.run(words, env=desk.environ(), cwd=desk.cwd, capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (status, said)


def test_a_driver_s_words_that_the_terminal_cannot_show_are_no_traceback(desk):
    machine(desk.bin, report([fields(0, **{"Product Name": "NVIDIA 显卡"})]), 1)
    done = desk.command(PYTHONIOENCODING="latin-1")
    assert "NVIDIA \\u663e\\u5361" in done.stdout
    assert done.stderr == ""


def test_json_holds_findings_and_facts(desk):
    machine(desk.bin, report([fields(0)]), 1)
    told = json.loads(desk.command("--json").stdout)
    assert (told["schema"], list(told)) == (1, ["schema", "findings", "facts"])
    assert {tuple(f) for f in told["findings"]} == {("level", "area", "what", "detail", "fix")}
    card = told["facts"]["gpus"]["smi"]["report"]["cards"][0]
    assert card["fields"]["Product Name"] == "NVIDIA H200"
    assert told["facts"]["network"]["hostname"]


@pytest.mark.parametrize(("level", "status"), [(OK, 0), (NOTE, 0), (PROBLEM, 1)])
def test_only_a_problem_makes_the_status_1(level, status):
    assert (
        doctor.status((Finding(OK, "a", "b", "", ""), Finding(level, "a", "b", "", ""))) == status
    )


# --- a machine that is not

BAD = {
    "fails": ('echo "No devices were found"; exit 6', "finds no GPU"),
    "not loaded": ('echo "couldn\'t communicate with the NVIDIA driver"; exit 9', "not loaded"),
    "bus": ("exit 15", "fallen off the bus"),
    "garbage": ("head -c 5000 /dev/urandom; exit 1", "exit status 1"),
    "dies": ("kill -SEGV $$", "SIGSEGV"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_failing_nvidia_smi_is_a_finding(desk, name):
    command, words = BAD[name]
    program(desk.bin, {}, command)
    found = desk.examine()
    assert any(words in f.what for f in about(found, "driver")), about(found, "driver")


@pytest.mark.parametrize("text", ["index, name\\n0, H200", "", "{}"], ids=["csv", "empty", "json"])
def test_a_lying_nvidia_smi_is_doubted(desk, text):
    program(desk.bin, {}, f"printf '{text}'")
    assert any("no report" in f.what for f in desk.examine())


def test_a_flood_of_output_ends(desk):
    program(desk.bin, {"-L": "exit 0"}, FLOOD)
    assert any("MiB" in f.what for f in desk.examine())
    assert desk.seconds < 10


def test_a_flood_that_outlives_us_is_stopped_by_the_kernel(tmp_path):
    """It goes to memory, and nobody may be left to look how much it is."""
    status = tmp_path / "status"
    script = f"trap '' PIPE; yes; echo $? >{status}"
    bounded.run(("sh", "-c", f"setsid sh -c {shlex.quote(script)} & sleep 60"), os.environ, 0.2)
    end = time.monotonic() + 30
    while not status.exists() or not status.read_text():
        assert time.monotonic() < end, "the flood goes on"
        time.sleep(0.01)
    assert status.read_text() == "1\n"


@pytest.mark.slow
@pytest.mark.parametrize("stubborn", ["sleep 60", "trap '' TERM; sleep 60 & wait"])
def test_a_hanging_nvidia_smi_costs_a_bounded_time(desk, stubborn):
    program(desk.bin, {}, stubborn)
    found = desk.examine()
    assert desk.seconds < 20
    assert any("did not end" in f.what for f in about(found, "driver"))


def test_a_gpu_that_is_lost_meanwhile_is_named(desk):
    machine(desk.bin, report([fields(0), fields(1)]), 2)
    found = desk.examine(FAKE_CUDA_BAD="1:context:46")
    assert any(f.level == PROBLEM and "GPU 1" in f.area for f in found), found


def test_a_gpu_that_nvidia_smi_cannot_open_is_named(desk):
    said = f"Unable to determine the device handle for GPU1: {bus(1)}: GPU is lost.\n"
    machine(desk.bin, said + report([fields(0)]), 1)
    found = desk.examine(FAKE_CUDA_GPUS="1")
    assert [f.level for f in about(found, "GPU 1")] == [PROBLEM]


def test_the_driver_library_that_does_not_start_is_a_problem(desk):
    machine(desk.bin, report([fields(0), fields(1)]), 2)
    found = desk.examine(FAKE_CUDA_INIT="802")
    assert any("802" in f"{f.what} {f.detail}" for f in problems(found)), problems(found)


def test_a_gpu_whose_memory_is_full_is_not_touched(desk, tmp_path):
    taken = {"FB Memory Usage/Used": "143000 MiB", "FB Memory Usage/Free": "150 MiB"}
    machine(desk.bin, report([fields(0), fields(1, **taken)]), 2)
    log = tmp_path / "log"
    found = desk.examine(FAKE_CUDA_LOG=str(log))
    assert log.read_text() == f"{uuid(0)}\n"
    assert [f.level for f in about(found, "GPU 1")] == [PROBLEM, NOTE]


def test_what_is_known_is_judged_although_more_was_asked_for(desk):
    machine(desk.bin, report([fields(0, **{"GPU Recovery Action": "Reset"})]), 1)
    found = desk.examine(deadline_s=2.0, FAKE_CUDA_INIT="hang", FAKE_CUDA_GPUS="1")
    assert desk.seconds < 8
    assert any("asks for: Reset" in f.what for f in about(found, "GPU 0"))


def test_a_driver_whose_files_hang_is_named_and_not_called_absent(desk, monkeypatch):
    monkeypatch.setattr(doctor, "FILES_S", 0.1)
    monkeypatch.setattr(doctor.nvidia, "driver_files", lambda: time.sleep(3))
    machine(desk.bin, report([fields(0)]), 1)
    found = desk.examine(FAKE_CUDA_GPUS="1")
    assert ["the driver's files" in f.what for f in about(found, "doctor")] == [True]
    assert about(found, "driver") == []
    assert about(found, "disk")


def test_xid_events_are_judged_although_the_drivers_files_are_not_shown(desk, monkeypatch):
    """As in a container without /proc/driver/nvidia."""
    line = f"NVRM: Xid (PCI:{bus(0)[:-2]}): 79, pid=71, GPU has fallen off the bus."
    monkeypatch.setattr(doctor.kernellog, "read", lambda e: doctor.kernellog.Log((line,), "x"))
    machine(desk.bin, report([fields(0, **{"GPU Recovery Action": "Reboot"})]), 1)
    found = about(desk.examine(FAKE_CUDA_GPUS="1"), "GPU 0")
    assert any(f.level == PROBLEM and "Xid 79" in f.what for f in found), found


def test_what_nvidia_smi_said_is_judged_although_the_driver_hangs_then(desk, monkeypatch):
    monkeypatch.setattr(doctor.gpu, "detect", lambda *a, **k: time.sleep(5))
    machine(desk.bin, report([fields(0, **{"GPU Recovery Action": "Reset"})]), 1)
    found = desk.examine(deadline_s=1.0)
    assert any("asks for: Reset" in f.what for f in about(found, "GPU 0"))
    assert any("the GPUs: no answer" in f.what for f in about(found, "doctor"))


def test_of_what_did_not_answer_in_time_nothing_lives(desk, tmp_path):
    program(desk.bin, {}, f"echo $$ > {tmp_path}/pid; exec sleep 60")
    desk.examine(deadline_s=1.0)
    assert ends(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("asked", ["-q", "-L"])
def test_ctrl_c_leaves_nothing_behind(desk, tmp_path, asked):
    new, pid = tmp_path / "new", tmp_path / "pid"
    hangs = {asked: f"echo $$ > {new}; mv {new} {pid}; exec sleep 60"}
    machine(desk.bin, report([fields(0)]), 1, **hangs)
    words = [sys.executable, "-m", "saferun", "doctor"]
    with subprocess.Popen(words, env=desk.environ(), stderr=subprocess.PIPE, text=True) as started:
        end = time.monotonic() + 20
        while not pid.exists() and time.monotonic() < end:
            time.sleep(0.02)
        started.send_signal(signal.SIGINT)
        _, said = started.communicate(timeout=20)
    assert (started.returncode, "Traceback" in said) == (130, False)
    assert ends(int(pid.read_text()))


def test_mig_is_a_note(desk):
    card = fields(0, **{"MIG Mode/Current": "Enabled"})
    machine(desk.bin, report([card]), 1)
    found = desk.examine(FAKE_CUDA_GPUS="1")
    assert [f.level for f in about(found, "GPU 0") if "MIG" in f.what] == [NOTE]


def test_a_machine_without_anything_is_a_note(desk):
    found = desk.examine(LD_LIBRARY_PATH="")
    assert [f.level for f in about(found, "driver")] == [NOTE]
    assert problems(found) == []


def test_full_without_a_gpu_says_so(desk):
    known = doctor.examine(desk.environ(LD_LIBRARY_PATH=""), str(desk.cwd))
    found = doctor.measure(known, desk.environ()).findings
    assert [(f.level, "no GPU" in f.what) for f in about(found, "speed")] == [(NOTE, True)]


def test_recovery_without_a_gpu_says_so(desk):
    found = doctor.examine(desk.environ(LD_LIBRARY_PATH=""), str(desk.cwd), recover=True).findings
    assert [f.level for f in about(found, "recovery")] == [NOTE]


def test_recovery_comes_first_and_the_trial_is_said_once(desk):
    machine(desk.bin, report([fields(0), fields(1)]), 2)
    found = doctor.examine(desk.environ(), str(desk.cwd), recover=True).findings
    assert len(found) == len(set(found))
    assert sum("made a context" in f.what for f in found) == 1


# --- its parts


@pytest.mark.parametrize(
    ("environ", "port"),
    [
        ({}, 29500),
        ({"MASTER_PORT": "1234"}, 1234),
        ({"MASTER_PORT": "1234", "PET_MASTER_PORT": "4321"}, 4321),
        ({"MASTER_PORT": "²²"}, 29500),
        ({"MASTER_PORT": "0"}, 29500),
        ({"MASTER_PORT": "65536"}, 29500),
        ({"MASTER_PORT": "9" * 5000}, 29500),
    ],
    ids=["default", "chosen", "torchrun's", "no number", "any", "too high", "absurd"],
)
def test_the_port_is_the_one_that_the_job_would_take(environ, port):
    assert doctor._port(environ) == port


def test_variables_that_are_not_text_are_no_traceback(desk):
    odd = {"HF_HOME": "/tmp/\udcff", "NCCL_SOCKET_IFNAME": "\udcff²", "SLURM_NNODES": "²"}
    strict = {"PYTHONIOENCODING": "utf-8:strict", "CUDA_VISIBLE_DEVICES": "\udcff\033[31m"}
    done = desk.command(LD_LIBRARY_PATH="", **strict, **odd)
    assert (done.returncode, done.stderr) == (1, "")
    assert "a fault of saferun" not in done.stdout
    assert "\033" not in done.stdout


def test_a_question_that_hangs_or_fails_keeps_nobody():
    told = together.ask(
        {"hangs": lambda: time.sleep(5), "fails": lambda: 1 // 0, "answers": lambda: 7}, 0.3
    )
    assert told.answers == {"answers": 7}
    assert told.late == ("hangs",)
    assert told.failed["fails"].startswith("ZeroDivisionError")


def test_what_did_not_answer_is_said_and_not_judged():
    outcome = together.Outcome({}, ("host",), {"log": "OSError: x"})
    late, failed = doctor._unanswered(outcome, 17.5)
    assert (late.level, failed.level) == (PROBLEM, NOTE)
    assert doctor.judge(doctor.Vitals(), {}, frozenset()) == []


def test_a_secret_in_what_was_found_is_masked(desk):
    secret = "hunter2-0123456789abcdef"
    program(desk.bin, {}, f"echo 'failed for {secret}'; exit 1")
    found = desk.examine(WANDB_API_KEY=secret)
    assert not any(secret in part for f in found for part in f)


def test_a_secret_in_the_facts_is_masked(desk):
    secret = "hunter2-0123456789abcdef"
    program(desk.bin, {}, f"echo 'failed for {secret}'; exit 1")
    done = desk.command("--json", WANDB_API_KEY=secret)
    assert secret not in done.stdout
    assert json.loads(done.stdout)["schema"] == 1


@pytest.mark.parametrize(
    ("command", "status", "trouble"),
    [
        ("exit 3", 3, "exit status 3"),
        ("true", 0, ""),
        ("kill -9 $$", -9, "killed by SIGKILL"),
        ("sleep 30", None, "did not end within 0.3 s"),
        ("trap '' TERM; sleep 30 & sleep 30", None, "did not end"),
        (FLOOD, None, "wrote more than"),
    ],
)
def test_a_command_is_bounded(command, status, trouble):
    timeout_s = 10 if command == FLOOD else 0.3
    answer = bounded.run(("/bin/sh", "-c", command), os.environ, timeout_s)
    assert answer.status == status
    assert trouble in answer.trouble


@pytest.mark.parametrize("stubborn", ["sleep 60 & echo $!; wait", "trap '' TERM; echo $$; wait"])
def test_of_a_command_that_was_cut_off_nothing_lives(stubborn):
    answer = bounded.run(("/bin/sh", "-c", f"sleep 60 & {stubborn}"), os.environ, 0.3)
    assert ends(int(answer.out))


def alive_with(mark):
    """The processes that have this in their environment."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            found += [path.parent.name] if mark.encode() in path.read_bytes() else []
    return found


def test_when_the_questions_are_over_nothing_of_them_lives_or_begins(tmp_path):
    """Whatever a thread was just about: some of these are between fork and being known to us."""
    answers = []

    def ask():
        answer = bounded.Answer("", "", 0, "")
        while "nobody waits" not in answer.trouble:
            answer = bounded.run(("sleep", "60"), {"MARK": str(tmp_path)}, 60)
        answers.append(answer)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(16)]
    with bounded.questions():
        for thread in threads:
            thread.start()
    end = time.monotonic() + 20
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert len(answers) == len(threads)
    assert alive_with(f"MARK={tmp_path}") == []
    assert bounded.run(("true",), os.environ, 10).trouble == ""  # in the main thread all is open


def test_output_is_kept_when_time_is_up_and_grandchildren_do_not_hold_it():
    words = ("/bin/sh", "-c", "sleep 30 & echo said; echo wrong >&2")
    began = time.monotonic()
    answer = bounded.run(words, os.environ, 10)
    assert time.monotonic() - began < 5
    assert (answer.out, answer.err, answer.status) == ("said\n", "wrong\n", 0)
    late = bounded.run(("/bin/sh", "-c", "echo early; sleep 30"), os.environ, 0.5)
    assert late.out == "early\n"


@pytest.mark.parametrize("words", [("/no/such/program",), ("/tmp",), ("a\0b",)])
def test_a_program_that_cannot_be_started_is_an_answer(words):
    answer = bounded.run(words, os.environ, 1)
    assert (answer.status, "cannot be run" in answer.trouble) == (None, True)


# --- the page

SAMPLE = [
    Finding(OK, "disk", "fine", "unsaid", ""),
    Finding(NOTE, "GPU 0", "ECC is off", "", "switch it on"),
    Finding(NOTE, "GPU 1", "ECC is off", "", "switch it on"),
    Finding(NOTE, "GPU 3", "ECC is off", "", "switch it on"),
    Finding(PROBLEM, "GPU at 0000:1a:00.0", "gone " * 30, "why https://a.b/" + "c" * 90, "fix it"),
]


def test_the_page_has_problems_first_and_fits_80_columns():
    lines = doctor_page.page(SAMPLE).splitlines()
    assert lines[0] == "1 problem, 1 note, 1 fine"
    titles = [line for line in lines[1:] if line and not line.startswith(" ")]
    assert titles == ["problems", "notes", "fine"]
    assert all(len(line) <= 80 or "https://" in line for line in lines)


def test_the_page_fits_a_narrow_terminal_as_far_as_it_can_be_read():
    sample = [Finding(NOTE, "limits", "few files " * 20, "", "more of them " * 9)]
    for columns, width in ((64, 64), (200, 80), (10, 50), (0, 50)):
        longest = max(map(len, doctor_page.page(sample, columns=columns).splitlines()))
        assert width - 10 < longest <= width


def test_a_command_to_copy_stands_on_one_line():
    fix = "end what runs on this GPU, then as root `nvidia-smi --gpu-reset -i 3`, or reboot"
    lines = doctor_page.page([Finding(PROBLEM, "GPU 3", "it hangs", "", fix)]).splitlines()
    assert any("`nvidia-smi --gpu-reset -i 3`" in line for line in lines), lines


def test_what_is_the_same_of_several_gpus_is_said_once():
    areas = [finding.area for finding in doctor_page.merged(SAMPLE)]
    assert areas == ["disk", "GPU 0-1, 3", "GPU at 0000:1a:00.0"]


def test_the_page_of_a_machine_without_fault_is_short():
    assert doctor_page.page(SAMPLE[:1]).splitlines()[0] == "all 1 checks are fine"


def test_colour_is_for_terminals():
    assert "\033[" in doctor_page.page(SAMPLE, colour=True)
    assert "\033[" not in doctor_page.page(SAMPLE)


def test_every_fact_becomes_json():
    facts = doctor.Vitals(gpus=doctor.Gpus(vitals.Smi(peers={(0, 1): "OK"})))
    told = json.loads(json.dumps(doctor_page.as_json(SAMPLE, facts)))
    assert told["facts"]["gpus"]["smi"]["peers"] == {"0 to 1": "OK"}
    assert told["findings"][0]["level"] == "ok"
