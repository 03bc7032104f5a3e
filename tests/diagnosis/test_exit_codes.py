"""Exit codes and signals: what a log, an error file or the launcher reports, and what it means."""

# ruff: noqa: E501 (what programs print is not wrapped)

import pytest
from cases import check_cases
from job_logs import SUMMARY, TRACEBACK, diagnose
from repo import ROOT

from saferun.diagnosis.deciding import exit_codes
from saferun.diagnosis.reading import log_reader

STATUSES = [  # kind and weight of an exit status; None where it says nothing
    (0, None),
    (1, ("child-failed-no-root", 15)),
    (2, ("child-failed-no-root", 14)),
    (127, ("user-missing-file", 40)),
    (128, ("child-failed-no-root", 15)),
    (129, ("sighup-terminal-closed", 26)),
    (141, None),  # SIGPIPE has a cause that others report
    (142, ("ended-by-signal", 21)),
    (143, ("sigterm-preempted", 13)),
    (145, ("child-failed-no-root", 15)),  # SIGCHLD ends no process: a status that a script chose
    (146, ("child-failed-no-root", 15)),
    (159, ("ended-by-signal", 21)),
    (160, ("child-failed-no-root", 15)),
    (-1, ("sighup-terminal-closed", 26)),
    (-13, None),
    (-14, ("ended-by-signal", 21)),
    (-64, ("ended-by-signal", 21)),
    (-65, None),
]


def test_an_exit_status_has_a_kind_and_a_weight():
    def check(status, known):
        assert exit_codes.kind_of(status) == known

    check_cases(STATUSES, check)


LINES = [  # a line of a log, and the code that it states; None for none
    ("a worker's return code = -9", -9),
    ("the command returned a non-zero status 137", 137),
    ("process 7 died with signal 9", -9),
    ("Received 15 death signal, shutting down", -15),
    ("got SIGVAL : 12", -12),
    ("got termination signal: Signals.SIGQUIT", -3),
    ("got termination signal: sigstop", -15),
    ("ended by SIGUSR2", -12),
    ("failed (exitcode: -6) local_rank: 0 (pid: 25495)", -6),
    ("exit status=5", 5),
    ("container rank 3 status failed cmd ['a'] code 12 log x", 12),
    ("error code: -11", -11),
    ("error code: -12", None),
    ("Killed", -9),
    ("run.sh: line 3:    71 Killed                  python t.py", -9),
    ("run.sh: line 3:    71 Terminated              python t.py", -15),
    ("run.sh: line 3:    71 Illegal instruction     python t.py", -4),
    ("run.sh: line 3:    71 Floating point exceptionpython t.py", -8),
    ("run.sh: line 3:    71 Floating point exceptionsh t.sh", -8),
    ("run.sh: line 3:    71 Trace/breakpoint trap   python t.py", -5),
    ("Floating point exceptions are masked", None),
    ("Terminated by the user", None),
    ("Aborted", -6),
    (" 9%| | 1/9 [00:01<00:08]a.sh: line 3:    71 Killed   python t.py", -9),
    (" 9%| | 1/9 [00:01<00:08]a.sh: line 3:    71 Aborted       (core dumped) python t.py", -6),
    ("Killed process group 3", None),
    ("x" * 388 + "core dumped", -6),
    ("x" * 389 + "core dumped", None),
    ("Sending process 3 closing signal SIGTERM", None),
    ("it may have been ended (e.g. SIGKILL)", None),
    ("exit code 1 (maybe SIGKILL)", 1),
]


def test_a_line_states_how_a_process_ended():
    def check(line, code):
        stated = exit_codes.find(log_reader.of_text(line).lines).signs
        assert [sign.code for sign in stated] == ([] if code is None else [code])

    check_cases(LINES, check)


@pytest.mark.parametrize(("other", "rank"), [("unknown", 1), ("1", 1), ("-11", None)])
def test_the_rank_of_a_kind_is_the_only_one_that_ended_so(other, rank):
    log = log_reader.of_text(f"[rank0]: exitcode  : {other}\n[rank1]: exitcode  : -11\n")
    assert exit_codes.rank_of("segfault", log.lines) == rank


KILLING = "Forcefully terminating all other processes\n"


@pytest.mark.parametrize(("lines", "kills"), [(39, 0), (40, 1)])
def test_kills_soon_after_a_launcher_began_to_kill_are_its_own(lines, kills):
    log = log_reader.of_text(KILLING + "a line\n" * (lines - 1) + "Killed\n")
    assert len(exit_codes.find(log.lines).signs) == kills


def test_of_a_process_that_ends_so_several_times_the_first_sign_counts():
    log = log_reader.of_text(
        "[rank1]: SIGSEGV\n[rank1]: SIGABRT\n[rank2]: SIGSEGV\n[rank1]: SIGSEGV\n"
    )
    signs = exit_codes.find(log.lines).signs
    assert [(sign.rank, sign.code, sign.at) for sign in signs] == [
        (1, -11, 0),
        (1, -6, 1),
        (2, -11, 2),
    ]


LOST = "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2\n"
BLOCKS = LOST + (
    "Failures:\n"
    "[1]:\n  time      : 2026-01-{}\n  rank      : 1 (local_rank: 1)\n  exitcode  : {} (pid: 12)\n"
    "  error_file: <N/A>\n"
    "------------------------------------------------------------\n"
    "Root Cause (first observed failure):\n"
    "[0]:\n  time      : 2026-01-{}\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 11)\n"
    "  error_file: <N/A>\n"
    "============================================================\n"
)
MOMENTS = [  # when the root failed, when the other rank was killed, kind and rank of the diagnosis
    ("01_10:00:25", "01_10:00:26", "host-oom-killed", 1),
    ("01_10:00:00", "01_10:00:02", "host-oom-killed", 1),
    ("01_10:00:00", "01_09:59:59", "host-oom-killed", 1),
    ("02_00:00:00", "01_23:59:59", "host-oom-killed", 1),
    ("01_10:00:00", "01_10:00:03", "peer-lost", 0),
    ("01_10:00:00", "01_10:01:00", "peer-lost", 0),
    ("01_10:00:00", "01_11:00:00", "peer-lost", 0),
    ("01_10:00:00", "02_10:00:00", "peer-lost", 0),
]


def test_a_kill_in_the_roots_own_moment_is_what_its_peer_saw():
    def check(root, other, kind, rank):
        found = diagnose(BLOCKS.format(other, -9, root))
        assert (found.kind, found.root_rank) == (kind, rank)

    check_cases(MOMENTS, check)


def test_an_abort_in_the_roots_own_moment_may_be_an_echo():
    block = "[0]:\n  time      : 2026-01-01_10:00:25\n  exitcode  : {} (pid: 12)\n"
    log = f"Failures:\n{block.format(-6)}Root Cause (first observed failure):\n{block.format(1)}"
    assert [sign.code for sign in exit_codes.find(log_reader.of_text(log).lines).signs] == [1]


def test_a_crash_belongs_to_its_rank_where_the_launcher_names_a_peer_first():
    for code, kind in ((-11, "segfault"), (-6, "abort-unknown"), (-14, "ended-by-signal")):
        found = diagnose(BLOCKS.format("01_10:00:00", code, "01_10:00:00"))
        assert (found.kind, found.root_rank) == (kind, 1)


def test_an_abort_is_no_cause_beside_a_mistake_or_once_the_launcher_asked_for_the_end():
    log = BLOCKS.format("01_10:00:00", -6, "01_10:00:00")
    asked = "W0920 api.py:900] Sending process 12 closing signal SIGTERM\n" + log
    mistake = log.replace("RuntimeError: ", "ValueError: ").replace("closed by peer", "is odd")
    assert [diagnose(one).root_rank for one in (asked, mistake, log.replace(LOST, ""))] == [0, 0, 0]


def test_a_rank_that_the_launcher_killed_is_not_the_machine_out_of_memory():
    killing = "W0920 api.py:900] Sending process 85005 closing signal SIGKILL\n"
    assert diagnose(killing + SUMMARY.format(rank=1, code=1)).kind == "child-failed-no-root"
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


@pytest.mark.parametrize("where", ["log", "command"])
def test_the_machines_counters_decide_what_a_signal_means(where):
    def check(code, known, kind):
        log = SUMMARY.format(rank=1, code=code) if where == "log" else ""
        exit_code = code if where == "command" else 1
        found = diagnose(log, exit_code=exit_code, **known)
        assert (found.kind, found.root_rank) == (kind, None if where == "command" else 1)

    check_cases(COUNTERS, check)


OF_WORKERS = [  # the signal's name, what the machine knows, kind
    ("Killed", {"oom_kills": None}, "host-oom-killed"),
    ("Killed", {"oom_kills": 1}, "host-oom-killed"),
    ("Killed", {"oom_kills": 0}, "killed-from-outside"),
    ("Bus error", {"shm_ample": False}, "dataloader-shm-full"),
    ("Bus error", {"shm_ample": True}, "bus-error"),
    ("Alarm clock", {"oom_kills": 0}, "ended-by-signal"),
    ("Aborted", {"oom_kills": 0}, "ended-by-signal"),
    ("Aborted", {"oom_kills": 1}, "dataloader-worker-died"),
]


_HANDED = (
    '  File "/t/torch/multiprocessing/reductions.py", line 540, in rebuild_storage_fd\n'
    "ConnectionResetError: [Errno 104] Connection reset by peer\n"
)


def test_the_machines_counters_decide_why_a_dataloader_worker_died():
    def check(signal, known, kind):
        line = f"RuntimeError: DataLoader worker (pid 7) is killed by signal: {signal}. \n"
        assert diagnose(TRACEBACK + line, exit_code=1, **known).kind == kind

    check_cases(OF_WORKERS, check)
    log = "Epoch 41/50: 12%|# | 108/900 [00:16<02:00, 6.60it/s]\n"
    log += "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly\n"
    for count, kind in enumerate(("ended-by-signal", "host-oom-killed")):
        assert diagnose(log, oom_kills=count).kind == kind
    frames = '  File "/v/torch/utils/data/dataloader.py", line 9, in {}\n' + _HANDED
    for taker, kind in (("_try_get_data", "ended-by-signal"), ("mine", "dataloader-worker-died")):
        assert diagnose(TRACEBACK + frames.format(taker), oom_kills=0).kind == kind
    line = "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).\n"
    ended = f"{line}{TRACEBACK}ConnectionResetError: [Errno 104] Connection reset by peer\n"
    for ample, kind in ((True, "bus-error"), (None, "dataloader-shm-full")):
        assert diagnose(ended, exit_code=1, shm_ample=ample).kind == kind


def test_the_end_of_a_worker_counts_wherever_its_signal_came():
    """torch raises it in SIGCHLD's handler: here as another exception left a `with` block."""
    first = _HANDED + "\nDuring handling of the above exception, another exception occurred:\n\n"
    frames = (
        '  File "/t/torch/autograd/profiler.py", line 860, in __exit__\n'
        "    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any):\n"
    )
    handler = (
        '  File "/t/torch/utils/data/_utils/signal_handling.py", line 73, in handler\n'
        "    _error_if_any_worker_fails()\n"
    )
    head = "Traceback (most recent call last):\n"
    line = "RuntimeError: DataLoader worker (pid 9248) is killed by signal: Aborted. \n"
    log = head + first + head + frames + handler + line
    assert diagnose(log, exit_code=1, oom_kills=0).kind == "ended-by-signal"
    log = log.replace("in handler", "in flush_handlers")  # what `__exit__` itself does
    assert diagnose(log, exit_code=1, oom_kills=0).kind == "dataloader-worker-died"


SIGNALS = [
    (6, "SIGABRT", "abort-unknown"),
    (3, "SIGQUIT", "abort-unknown"),
    (15, "SIGTERM", "sigterm-preempted"),
    (14, "SIGALRM", "ended-by-signal"),
    (34, "SIGRTMIN", "ended-by-signal"),
]


@pytest.mark.parametrize("alone", [False, True], ids=["beside a peer's error", "alone"])
@pytest.mark.parametrize(("number", "name", "kind"), SIGNALS)
def test_the_signal_that_the_first_rank_died_of_outweighs_torchruns_own_error(
    number, name, kind, alone
):
    log = (ROOT / "tests" / "records" / "logs" / "abrt.log").read_text(encoding="utf-8")
    log = log.replace("-6", f"-{number}").replace("SIGABRT", name)
    log = log.replace("Signal 6", f"Signal {number}")
    if alone:
        kept = (line for line in log.splitlines() if not line.startswith("[rank0]"))
        log = "\n".join(kept)
    found = diagnose(log, exit_code=1)
    assert (found.kind, found.verdict, found.root_rank) == (kind, "retry", 1)
    assert name in found.root_line
