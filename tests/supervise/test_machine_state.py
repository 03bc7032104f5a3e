"""What the machine shows after an attempt whose output says nothing."""

import os
import types
from typing import Any

import pytest
from fake_nvml import Nvml, gpu
from job_logs import KNOWN

from saferun.diagnosis.deciding import classify
from saferun.diagnosis.evidence import Evidence, Observation, RankFailure
from saferun.diagnosis.reading import log_reader
from saferun.gpu.nvml import LIBRARY
from saferun.model import Gpu
from saferun.supervise.attempt import machine_state
from saferun.supervise.attempt.machine_state import Scene
from saferun.system import gpus, kernellog

UUID = "GPU-00000000-1111-2222-3333-444444444444"
XID = "NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus."


def scene(**facts: Any) -> Scene:
    usual: dict[str, Any] = {"environ": {}, "gpus": (), "began_s": 100.0, "folders": ()}
    return Scene(**{**usual, **facts})


def judged(log: str, *, where: Scene | None = None, **facts: Any) -> classify.Diagnosis:
    seen = Evidence(log=log_reader.of_text(log), **facts)
    observed = machine_state.observed(seen, where or scene())
    return classify.by_machine(classify.classify(seen, KNOWN), observed, KNOWN)


def test_a_sentence_in_an_error_file_tells_where_nothing_else_does():
    failures = (RankFailure(rank=3, message="worker was preempted"),)
    found = judged("", failures=failures, exit_code=1)
    assert (found.kind, found.root_line) == ("user-exception", "worker was preempted")
    assert found.decided_by == ("error file of rank 3",)
    found = judged("", failures=failures, oom_kills=2)
    assert (found.kind, found.decided_by) == ("host-oom-killed", ("kernel's count of kills",))
    assert found.root_line == "kernel: 2 killed for lack of memory while it ran"
    assert judged("\n", exit_code=1).decided_by == ("exit status 1",)


def test_an_exception_that_passes_a_failure_on_leaves_the_word_to_the_machine():
    passed_on = "subprocess.CalledProcessError: Command 'prepare' returned non-zero exit status 1."
    failures = (RankFailure(rank=0, message=passed_on),)
    assert judged("odd\n", failures=failures).kind == "child-failed-no-root"
    assert judged("odd\n", failures=failures, oom_kills=1).kind == "host-oom-killed"


def test_a_launchers_summary_without_a_reason_is_explained_by_the_machine():
    summary = "train.py FAILED\nRoot Cause (first observed failure):\n  exitcode  : 1 (pid: 11)\n"
    assert judged(summary).kind == "child-failed-no-root"
    assert judged(summary, oom_kills=1).kind == "host-oom-killed"


def test_what_the_log_says_is_not_asked_of_the_machine():
    def fails() -> Any:
        raise AssertionError("nothing is looked at")
        yield

    found = classify.classify(Evidence(log=log_reader.of_text("KeyError: 'x'\n")), KNOWN)
    assert classify.by_machine(found, fails(), KNOWN) == found


@pytest.mark.parametrize(
    ("status", "signal", "gone", "kind"),
    [
        (142, 14, False, "ended-by-signal"),
        (142, None, False, "ended-by-signal"),  # as a shell says so of its script
        (141, 13, True, "output-reader-gone"),
        (141, 13, False, "ended-by-signal"),
        (1, None, True, "unknown"),
    ],
)
def test_a_signal_tells_by_itself(status, signal, gone, kind):
    where = scene(signal=signal)
    assert judged("odd\n", where=where, exit_code=status, reader_gone=gone).kind == kind


# --- disks ---------------------------------------------------------------------------------------


def disk(**changed: int) -> types.SimpleNamespace:
    room = {"f_bavail": 9**9, "f_bfree": 9**9, "f_blocks": 9**9, "f_frsize": 4096}
    inodes = {"f_files": 9**6, "f_favail": 9**5, "f_flag": 0}
    return types.SimpleNamespace(**{**room, **inodes, **changed})


NO_ROOM = {"f_bavail": 3, "f_bfree": 3}


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (disk(), None),
        (disk(**NO_ROOM), "12 KiB free"),
        (disk(f_favail=0), "no inodes free"),
        (disk(f_favail=0, f_files=0), None),  # btrfs counts none
        (disk(**NO_ROOM, f_flag=os.ST_RDONLY), None),  # an image: full, and nobody writes there
        (disk(f_bavail=0, f_bfree=0, f_blocks=0), None),  # /proc
    ],
    ids=["room", "full", "no inodes", "without inodes", "read-only", "no disk"],
)
def test_a_disk_is_full_where_nothing_more_can_be_written(tmp_path, monkeypatch, found, text):
    monkeypatch.setattr(os, "statvfs", lambda folder: found)
    seen = list(machine_state.full_disks([str(tmp_path), str(tmp_path), "/no/such/folder"]))
    wanted = f"the disk of {tmp_path} is full: {text}"
    assert seen == ([Observation("disk", wanted, "disk-full")] if text else [])


# --- the kernel's log ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "kind"),
    [({UUID: "0000:c1:00.0"}, "gpu-lost"), ({UUID: "0000:44:00.0"}, "unknown"), ({}, "gpu-lost")],
    ids=["the job's", "another's", "not known"],
)
def test_an_xid_tells_where_it_may_be_of_the_jobs_gpu(tmp_path, monkeypatch, addresses, kind):
    (tmp_path / LIBRARY).touch()  # this machine's NVML knows no such GPU
    log = kernellog.Log((f"4,2,6,-;{XID}",), "x")
    monkeypatch.setattr(kernellog, "read", lambda environ, *, since_s: log)
    monkeypatch.setattr(gpus, "addresses", lambda: addresses)
    environ = {"LD_LIBRARY_PATH": str(tmp_path)}
    found = judged("odd\n", where=scene(environ=environ, gpus=(Gpu(0, UUID, "NVIDIA H100"),)))
    assert found.kind == kind
    if kind == "gpu-lost":
        assert (found.root_line, found.decided_by) == (XID, ("kernel's log",))
    assert judged("odd\n", where=scene()).kind == "unknown", "it has no GPU"


# --- NVML ----------------------------------------------------------------------------------------


OTHER = UUID.replace("0000", "9999")


@pytest.mark.parametrize(
    ("answers", "general", "kind"),
    [
        ({"GetHandle": "!15"}, {}, "gpu-lost"),
        ({"GetUUID": OTHER}, {}, "gpu-lost"),
        ({"GetMemoryInfo_v2": "!16"}, {}, "gpu-lost"),
        ({"value.230": "1"}, {}, "gpu-lost"),
        ({"value.230": "3"}, {}, "gpu-link-failed"),
        ({}, {}, "unknown"),
        ({}, {"Init_v2": "!18"}, "nvml-version-mismatch"),
        ({}, {"Init_v2": "crash"}, "unknown"),
        (None, {}, "unknown"),
    ],
    ids=["lost", "not listed", "sick", "reset", "link", "well", "driver", "crash", "no library"],
)
def test_a_gpu_that_does_not_answer_tells(tmp_path, monkeypatch, answers, general, kind):
    monkeypatch.setattr(kernellog, "read", lambda environ, *, since_s: kernellog.Log())
    nvml = Nvml(tmp_path / "nvml")
    nvml.reports(gpu(**{"GetUUID": UUID, **(answers or {})}), **general)
    if answers is None:
        (nvml.folder / LIBRARY).unlink()
        (nvml.folder / LIBRARY).touch()
    environ = {"LD_LIBRARY_PATH": str(nvml.folder)}
    where = scene(environ=environ, gpus=(Gpu(0, UUID, "NVIDIA H100"),))
    found = judged("odd\n", where=where)
    named = kind.startswith("gpu-") and "GetHandle" not in answers  # it cannot tell its UUID
    assert (found.kind, found.gpu) == (kind, UUID if named else "")
