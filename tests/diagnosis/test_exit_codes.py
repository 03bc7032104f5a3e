"""Exit codes and signals: what a log, an error file or the launcher reports, and what it means."""

# ruff: noqa: E501 (what programs print is not wrapped)

from __future__ import annotations

import pytest
from cases import check_cases
from job_logs import SUMMARY, TRACEBACK, diagnose
from repo import ROOT

from saferun.diagnosis.evidence import RankFailure


def test_the_launchers_root_cause_block_names_rank_and_signal():
    found = diagnose(SUMMARY.format(rank=5, code=-9))
    assert (found.kind, found.root_rank) == ("host-oom-killed", 5)


@pytest.mark.parametrize(
    ("second", "kind", "rank"), [("26", "host-oom-killed", 1), ("56", "peer-lost", 0)],
    ids=["seen a moment later", "killed by the launcher"],
)  # fmt: skip
def test_a_kill_in_the_roots_own_moment_is_what_its_peer_saw(second, kind, rank):
    found = diagnose(
        "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2\n"
        "Failures:\n"
        f"[1]:\n  time      : 2026-01-01_10:00:{second}\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 12)\n"
        "------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n  time      : 2026-01-01_10:00:25\n  rank      : 0 (local_rank: 0)\n"
        "  exitcode  : 1 (pid: 11)\n"
        "============================================================\n"
    )
    assert (found.kind, found.root_rank) == (kind, rank)


def test_a_crash_belongs_to_its_rank_where_the_launcher_names_a_peer_first():
    found = diagnose(
        "Fatal Python error: Segmentation fault\n"
        "Failures:\n"
        "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : -11 (pid: 12)\n"
        "------------------------------------------------------------\n"
        "Root Cause (first observed failure):\n"
        "[0]:\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 11)\n"
        "============================================================\n"
    )
    assert (found.kind, found.root_rank) == ("segfault", 1)


def test_a_launcher_that_ends_the_other_ranks_with_sigkill_is_not_the_machine_out_of_memory():
    killing = "W0920 api.py:900] Sending process 85005 closing signal SIGKILL\n"
    assert diagnose(killing + SUMMARY.format(rank=1, code=1)).kind == "child-failed-no-root"


def test_a_rank_that_the_launcher_killed_after_the_root_is_not_the_machine_out_of_memory():
    killed_after = SUMMARY.replace("-15", "-9").format(rank=1, code=1)
    assert diagnose(killed_after, oom_kills=0).kind == "child-failed-no-root"


COUNTERS = [  # exit code, what the machine knows, kind
    (-9, {"oom_kills": None}, "host-oom-killed"),
    (-9, {"oom_kills": 1}, "host-oom-killed"),
    (-9, {"oom_kills": 0}, "killed-from-outside"),
    (-7, {"shm_ample": None}, "dataloader-shm-full"),
    (-7, {"shm_ample": False}, "dataloader-shm-full"),
    (-7, {"shm_ample": True}, "bus-error"),
    (-11, {"finished": False}, "segfault"),
    (-11, {"finished": True}, "crash-after-the-end"),
    (-6, {"finished": True}, "crash-after-the-end"),
    (-9, {"finished": True, "oom_kills": 0}, "killed-from-outside"),
]


@pytest.mark.parametrize("where", ["log", "rank", "command"])
def test_the_machines_counters_decide_what_a_signal_means(where):
    def check(code, known, kind):
        log = SUMMARY.format(rank=1, code=code) if where == "log" else ""
        failures = (RankFailure(rank=1, exit_code=code),) if where == "rank" else ()
        exit_code = code if where == "command" else 1
        found = diagnose(log, failures=failures, exit_code=exit_code, **known)
        assert found.kind == kind

    check_cases(COUNTERS, check)


@pytest.mark.parametrize(
    ("signal", "known", "kind"),
    [
        ("Killed", {"oom_kills": None}, "host-oom-killed"),
        ("Killed", {"oom_kills": 1}, "host-oom-killed"),
        ("Killed", {"oom_kills": 0}, "killed-from-outside"),
        ("Bus error", {"shm_ample": False}, "dataloader-shm-full"),
        ("Bus error", {"shm_ample": True}, "bus-error"),
        ("Alarm clock", {"oom_kills": 0}, "ended-by-signal"),
        ("Aborted", {"oom_kills": 0}, "ended-by-signal"),
        ("Aborted", {"oom_kills": 1}, "dataloader-worker-died"),
        ("User defined signal 1", {"oom_kills": 0}, "ended-by-signal"),
    ],
)
def test_the_machines_counters_decide_why_a_dataloader_worker_died(signal, known, kind):
    line = f"RuntimeError: DataLoader worker (pid 7) is killed by signal: {signal}. \n"
    assert diagnose(TRACEBACK + line, exit_code=1, **known).kind == kind


@pytest.mark.parametrize(
    ("ample", "kind"),
    [(True, "bus-error"), (False, "dataloader-shm-full"), (None, "dataloader-shm-full")],
)
def test_a_bus_error_that_a_worker_reports_itself_is_asked_of_the_machine_too(ample, kind):
    line = "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    ended = TRACEBACK + "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    assert diagnose(line + ended, exit_code=1, shm_ample=ample).kind == kind


def test_a_killed_rank_is_known_from_its_status_alone():
    failures = (RankFailure(rank=6, exit_code=-9),)
    found = diagnose("", failures=failures, exit_code=1)
    assert (found.kind, found.root_rank) == ("host-oom-killed", 6)


@pytest.mark.parametrize(
    ("code", "kind"),
    [(-9, "host-oom-killed"), (137, "host-oom-killed"), (139, "segfault"), (134, "abort-unknown"),
     (143, "sigterm-preempted"), (129, "sighup-terminal-closed"), (130, "interrupted"), (7, "child-failed-no-root")],
)  # fmt: skip
def test_without_a_log_the_exit_status_is_what_is_known(code, kind):
    assert diagnose("", exit_code=code).kind == kind


SIGNALS = {
    6: ("SIGABRT", "abort-unknown"),
    3: ("SIGQUIT", "abort-unknown"),
    15: ("SIGTERM", "sigterm-preempted"),
    14: ("SIGALRM", "ended-by-signal"),
    26: ("SIGVTALRM", "ended-by-signal"),
    34: ("SIGRTMIN", "ended-by-signal"),
}


@pytest.mark.parametrize("alone", [False, True], ids=["beside a peer's error", "alone"])
@pytest.mark.parametrize(("number", "name", "kind"), [(n, *v) for n, v in SIGNALS.items()])
def test_the_signal_that_the_first_rank_died_of_outweighs_torchruns_own_error(
    number, name, kind, alone
):
    log = (ROOT / "tests" / "records" / "logs" / "abrt.log").read_text()
    log = log.replace("-6", f"-{number}").replace("SIGABRT", name)
    log = log.replace("Signal 6", f"Signal {number}")
    if alone:
        kept = (line for line in log.splitlines() if not line.startswith("[rank0]"))
        log = "\n".join(kept)
    found = diagnose(log, exit_code=1)
    assert (found.kind, found.verdict, found.root_rank) == (kind, "retry", 1)
    assert name in found.root_line
