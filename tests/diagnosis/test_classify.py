"""Evidence in, diagnosis out: which failure is recognised, and whose fault it is."""

# ruff: noqa: E501 (what programs print is not wrapped)

import pytest
from cases import check_cases, spread
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from job_logs import FULL_CARD, KNOWN, TIMEOUT, TRACEBACK, diagnose, table, wrongly_diagnosed

from saferun.diagnosis import signatures
from saferun.diagnosis.deciding import classify, root_line
from saferun.diagnosis.diagnosis import Diagnosis
from saferun.diagnosis.evidence import Evidence, Hang, RankFailure
from saferun.diagnosis.reading import log_reader, oom_message
from saferun.inject.node import node_agreement

KINDS = table("kinds")
# What a log alone cannot show.
NOT_BY_LOG = {
    *("unknown", "no-failure", "gpu-p2p-corrupt", "segfault-environment", "killed-from-outside"),
    *("bus-error", "process-unkillable", "output-reader-gone", "hooks-missing"),
    *("hang", "keeper-killed", "node-lost", "loss-not-finite"),
}


def test_each_kind_of_failure_is_recognised():
    assert wrongly_diagnosed(KINDS) == []


def test_the_table_has_every_kind_that_a_log_alone_can_show():
    assert set(KNOWN.kinds) - {row["kind"] for row in KINDS} == NOT_BY_LOG


def test_other_wordings_of_real_logs_are_recognised():
    assert wrongly_diagnosed(table("wordings")) == []


# --- a user's error is never retried ---------------------------------------------------------------

OWN = [
    "mypackage.errors.DataShapeProblem: bad thing",
    "AssertionError",
    "TimeoutError: my queue was empty for 5 s",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: Operation timed out! my own thing",
    "requests.exceptions.HTTPError: 404 Client Error: Not Found for url: https://huggingface.co/x/config.json",
    "requests.exceptions.SSLError: HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded (Caused by SSLError('[SSL: CERTIFICATE_VERIFY_FAILED]'))",
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='localhost', port=8000): Max retries exceeded with url: /v1",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "RuntimeError: shape '[3, 4]' is invalid for input of size 13",
    "TypeError: forward() missing 1 required positional argument: 'mask'",
]


def test_an_uncaught_exception_that_nothing_knows_is_the_users():
    verdicts = {line: diagnose(TRACEBACK + line, exit_code=1).verdict for line in OWN}
    assert verdicts == dict.fromkeys(OWN, "stop-user")


@pytest.mark.parametrize("code", [2, 3, 137])
def test_where_only_an_exit_code_decides_no_line_of_the_job_does(code):
    """Python has 2 for a script that is not there, argparse for a wrong argument."""
    found = diagnose("step 7 loss 0.3\nan error was logged here\nbye", exit_code=code)
    assert (found.kind == "user-args-error", found.root_line) == (False, "")


# Kinds that decide although an exception stands before them: the machine reports them, not a rank.
HARD = {"stale-file-handle", "sigterm-preempted", "nccl-shm-failed", "node-failed"}
HARD |= {"study-storage-locked", "study-storage-full", "study-storage-unreachable"}


def test_an_own_exception_before_it_stops_what_would_be_retried():
    retried = []
    for row in KINDS:
        if row["kind"] in HARD or KNOWN.kinds[row["kind"]].verdict not in ("retry", "mitigate"):
            continue
        heading = TRACEBACK if "File" not in row["log"] else ""
        found = diagnose(f"{TRACEBACK}ValueError: bad batch\n\n{heading}{row['log']}")
        if found.verdict != "stop-user":
            retried.append((row["name"], found.kind))
    assert retried == []


# --- without a failure that is known ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (b"", ""),
        (b"\x7fELF\x00\x01\x02" * 400, None),
        ("训练开始\n第1轮\n完成".encode(), "完成"),
        (b"all went well\nbut the gremlin failed somehow\nbye\n", "but the gremlin failed somehow"),
        (TRACEBACK.encode() + b'  File "/e/torch/distributed/c10d.py", line 3, in barr', None),
    ],
    ids=["empty", "binary", "another language", "nothing that is known", "cut in a collective"],
)
def test_what_nothing_explains_is_unknown_with_its_most_telling_line(log, line):
    found = diagnose(log, exit_code=1)
    assert (found.kind, found.verdict) == ("unknown", "unknown")
    if line is not None:
        assert found.root_line == line


HANG = Hang("hang", 1, "waits in request_wait_answer on /mnt/data")
FULL = f"{TRACEBACK}OSError: [Errno 28] No space left on device\n"
BESIDE_THE_LOG = {  # what is known: kind, verdict, rank, line
    "a process that cannot end": ({"unkillable": 1}, "process-unkillable", "stop-hardware", None, ""),
    "the same of a hang": (
        {"unkillable": 1, "hang": HANG}, "process-unkillable", "stop-hardware", 1, HANG.line,
    ),
    "our keeper's death": ({"keeper": "it was killed"}, "keeper-killed", "retry", None, "it was killed"),
    "what the watch saw": ({"hang": HANG}, "hang", "retry", 1, HANG.line),
    "success": ({"exit_code": 0}, "no-failure", "retry", None, ""),
}  # fmt: skip


def test_what_is_known_beside_the_log_outweighs_it():
    def check(known, kind, verdict, rank, line):
        found = diagnose(FULL, **{"exit_code": 137, **known})
        assert (found.kind, found.root_rank, found.root_line) == (kind, rank, line)
        assert kind == "no-failure" or found.verdict == verdict

    check_cases(BESIDE_THE_LOG, check)


def test_a_broken_pipe_is_the_end_where_nobody_reads_and_an_error_like_others_elsewhere():
    printed = (
        "Traceback (most recent call last):\n  print(1)\nBrokenPipeError: [Errno 32] Broken pipe\n"
    )
    log = log_reader.of_text(printed)
    gone = classify.classify(Evidence(log=log, exit_code=1, reader_gone=True), KNOWN)
    assert (gone.kind, gone.verdict) == ("output-reader-gone", "stop-user")
    there = classify.classify(Evidence(log=log, exit_code=1), KNOWN)
    assert there.kind != "output-reader-gone"
    raised = "BrokenPipeError: [Errno 32] Broken pipe"
    for own in ({"message": raised}, {"traceback": f"x\n{raised}\n"}):
        failures = (RankFailure(3, **own),)
        alone = Evidence(exit_code=1, reader_gone=True, failures=failures)
        told = classify.classify(alone, KNOWN)
        assert (told.root_rank, told.root_line) == (3, raised)
    quiet = Evidence(exit_code=1, reader_gone=True, failures=(RankFailure(3, message="x"),))
    assert classify.classify(quiet, KNOWN).kind != "output-reader-gone"


def test_an_exception_behind_other_words_counts_where_nothing_else_does():
    found = diagnose("step 1\nworker 7 sent: KeyError: 'label'\n")
    assert (found.kind, found.root_line) == ("user-exception", "worker 7 sent: KeyError: 'label'")
    assert diagnose("step 1\nworker 7 sent an error\n").kind == "unknown"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.one_of(
            st.sampled_from([line for row in KINDS for line in row["log"].splitlines()]),
            st.text(max_size=80),
            st.binary(max_size=60).map(lambda data: data.decode("latin-1")),
        ),
        max_size=12,
    ),
    st.sampled_from([None, 0, 1, 2, -9, 137]),
)
@example(["Traceback (most recent call last):"], 1)
def test_any_log_gets_a_verdict(rows, exit_code):
    found = diagnose("\n".join(rows), exit_code=exit_code)
    assert found.verdict in signatures.VERDICTS
    assert len(found.root_line) <= root_line.ROOT_CHARS


# --- what others say of it -------------------------------------------------------------------------

OWN_ERROR = diagnose(f"[rank2]: {TRACEBACK}[rank2]: KeyError: 'a'\n")
ECHO = diagnose(
    "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:2\n"
)


def test_a_diagnosis_has_what_is_known_of_its_kind():
    kind = KNOWN.kinds["port-in-use"]
    found = diagnose(TRACEBACK + "RuntimeError: Address already in use\n")
    assert (found.kind, found.group, found.verdict) == ("port-in-use", kind.group, kind.verdict)
    assert (found.mitigations, found.advice) == (kind.mitigations, kind.advice)
    assert (found.explanation, found.references) == (kind.explanation, kind.references)


def test_what_the_agents_lost_counts_where_nothing_here_is_a_cause():
    stated, nothing = diagnose("ERROR: the corpus has no sentences"), diagnose("bye\n")
    weights = [classify.weight(one, KNOWN) for one in (OWN_ERROR, ECHO, stated, nothing)]
    assert weights == [
        node_agreement.ROOT,
        node_agreement.ECHO,
        node_agreement.WEAK,
        node_agreement.WEAK,
    ]
    assert classify.by_nodes(OWN_ERROR, "node 2 is silent", KNOWN) == OWN_ERROR
    assert classify.by_nodes(ECHO, "", KNOWN) == ECHO
    for one in (ECHO, nothing):
        lost = classify.by_nodes(one, "node 2 is silent", KNOWN)
        assert (lost.kind, lost.root_line) == ("node-lost", "node 2 is silent")
        assert lost.root_rank is None
        assert lost.decided_by == ("the agents' heartbeats",)


def test_a_process_may_name_the_kind_of_its_failure_itself():
    printed = f"[rank2]: {TRACEBACK}[rank2]: KeyError: 'a'\n"
    named = diagnose(printed, named="disk-full")
    assert (named.kind, named.decided_by) == ("disk-full", ("the process's own word",))
    assert (named.root_line, named.root_rank) == (OWN_ERROR.root_line, 2)
    assert diagnose(printed, named="no-such-kind") == OWN_ERROR


def test_a_diagnosis_is_made_again_from_what_the_journal_has_of_it():
    first = diagnose(FULL_CARD)
    numbers = oom_message.sentence(oom_message.read(FULL_CARD))
    assert first.explanation == f"{KNOWN.kinds[first.kind].explanation} {numbers}"
    again = classify.recorded(first._replace(root_rank=3, explanation="", advice=""), KNOWN)
    assert again == first._replace(root_rank=3)
    assert classify.recorded(Diagnosis("no-such-kind"), KNOWN) is None


# --- the same failure twice ---------------------------------------------------------------------------


def test_the_fingerprint_forgets_ranks_numbers_addresses_and_directories():
    one = diagnose(
        "[rank3]: FileNotFoundError: [Errno 2] No such file: '/data/a/b.bin' at 0x7f12ab line 88"
    )
    two = diagnose(
        "[rank5]: FileNotFoundError: [Errno 2] No such file: '/mnt/z.bin' at 0x9912cd line 9"
    )
    assert classify.fingerprint(one) == classify.fingerprint(two)
    said = "FileNotFoundError: [Errno N] No such file: 'P' at H line N"
    assert classify.fingerprint(one) == f"{one.kind}: {said}"


def test_the_fingerprint_differs_between_different_failures():
    one, *others = (
        classify.fingerprint(diagnose(TRACEBACK + line))
        for line in ("ValueError: bad batch", "ValueError: bad label", "KeyError: bad batch")
    )
    assert one not in others


NCCL_ERROR = (
    f"{TRACEBACK}torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled "
    "cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\n"
)
NCCL_WARNS = "h:12:34 [0] transport/p2p.cc:4 NCCL WARN {} failure '{}'\n"
PASSED_ON = {  # how NCCL passes on what CUDA said
    "last error": NCCL_ERROR + "Last error:\n{} failure '{}'\n",
    "a rank's": "".join(f"[rank1]: {row}\n" for row in NCCL_ERROR.splitlines()[3:])
    + "[rank1]: Last error:\n[rank1]: {} failure '{}'\n",
    "a line above": NCCL_WARNS + NCCL_ERROR,
    "a line alone": NCCL_WARNS,
}
CUDA_WORDS = (
    *("out of memory", "device-side assert triggered", "an illegal memory access was encountered"),
    *("unspecified launch failure", "misaligned address", "an illegal instruction was encountered"),
    *("the launch timed out and was terminated", "invalid device ordinal", "hardware stack error"),
    *("invalid device function", "no kernel image is available for execution on the device"),
    *("uncorrectable ECC error encountered", "system not yet initialized"),
    "invalid program counter",
    *("CUDA driver version is insufficient for CUDA runtime version", "context is destroyed"),
    *("all CUDA-capable devices are busy or unavailable", "no CUDA-capable device is detected"),
    *("the provided PTX was compiled with an unsupported toolchain.", "invalid resource handle"),
    *("operation not permitted when stream is capturing", "MPS server failed", "device not ready"),
)
OF_SET_UP = (
    *("invalid argument", "initialization error", "peer access is not supported between these two"),
    *("unknown error", "the operation cannot be performed in the present state"),
)


def test_what_cuda_told_nccl_means_what_it_means_anywhere():
    alone = {words: diagnose(f"RuntimeError: CUDA error: {words}\n").kind for words in CUDA_WORDS}
    kinds = alone | dict.fromkeys(OF_SET_UP, "nccl-unhandled-cuda-error")

    def check(words, kind, way):
        assert diagnose(PASSED_ON[way].format("Cuda", words)).kind == kind

    check_cases(
        spread({words: (words, kind) for words, kind in kinds.items()}, list(PASSED_ON)), check
    )


def test_a_timeout_of_collectives_has_the_rank_that_the_others_waited_for():
    line = "rank 2 is at t.py:8 in evaluate, 3 ranks wait for it in all_reduce (42 s)"
    stall = Hang("hang", 2, line)
    timed_out = diagnose(TIMEOUT)
    found = diagnose(TIMEOUT, stall=stall)
    assert (timed_out.root_rank, timed_out.decided_by) == (0, ("log",))
    assert found == timed_out._replace(root_rank=2, decided_by=("log", f"the watch: {line}"))
    assert diagnose(TIMEOUT, stall=stall._replace(rank=None)).root_rank == 0
    assert diagnose("KeyError: 'a'\n", stall=stall) == diagnose("KeyError: 'a'\n")
