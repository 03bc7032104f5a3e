"""Exceptions of the world outside the job: what passes is tried again, and a mistake is not."""

import re

from cases import check_cases
from job_logs import KNOWN, SUMMARY, TRACEBACK, diagnose, output, table

from saferun.diagnosis.evidence import RankFailure

STEPS = output(500)
LOCAL = f"{TRACEBACK}  File \"/w/push.py\", line 3, in push\n    c = connect('127.0.0.1', 6379)\n"
ROWS = [
    (raised, *group["verdicts"], group.get("kind"))
    for group in table("outside")
    for raised in group["raised"]
]
LOADER = (  # torch's DataLoader raises a worker's exception again
    f'{TRACEBACK}  File "/w/train.py", line 8, in run\n    for batch in loader:\n'
    '  File "/e/lib/python3.11/site-packages/torch/_utils.py", line 769, in reraise\n'
    "    raise exception\n{name}: Caught {name} in DataLoader worker process 5.\nOriginal "
)
REFUSED = "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>"


def holds(raised: str, before: str, after: str, kind: str | None) -> None:
    alone = diagnose(f"{LOCAL}{raised}\n")
    marked = "[rank1]: " + f"{LOCAL}{raised}".replace("\n", "\n[rank1]: ") + "\n"
    below = diagnose(f"{marked}{SUMMARY.format(rank=1, code=1)}")
    assert (alone.verdict, below.verdict, below.kind) == (before, before, alone.kind)
    assert diagnose(f"step 0 loss 2.5\n{LOCAL}{raised}\n", step=None).verdict == before
    name = re.match(r"[\w.]*?(\w+)(?=:|$)", raised)
    if name and not raised.startswith("terminate"):
        again = "".join([LOADER.format(name=name[1]), LOCAL, raised, "\n"])
        assert diagnose(again).verdict == before
        assert diagnose(STEPS + again).verdict == after
    late = diagnose(f"{STEPS}{LOCAL}{raised}\n")
    assert late.verdict == after
    live = RankFailure(rank=1, traceback=f"{LOCAL}{raised}")
    assert diagnose("", failures=(live,), step=499).verdict == after
    assert kind is None or late.kind == kind


def test_what_an_exception_is_decides_before_the_first_steps_and_after_them():
    check_cases(ROWS, holds)


def test_no_row_of_the_table_is_without_use():
    """Each row that names a kind decides for some exception of the records."""
    from saferun.diagnosis.deciding import outside_faults
    from saferun.diagnosis.reading import tracebacks
    from saferun.diagnosis.reading.log_reader import of_text

    used = set()
    for raised, *_ in ROWS:
        for found in tracebacks.find(of_text(f"{LOCAL}{raised}").lines).raised:
            used.add(outside_faults.row_of(found, KNOWN.outside))
    assert [row for row in KNOWN.outside if row.kind and row not in used] == []


def test_a_time_limit_of_the_scripts_own_is_told_by_who_raised_it():
    own = f'{TRACEBACK}  File "/w/train.py", line 9, in f\n    raise TimeoutError("timed out")\n'
    deep = (
        f'{TRACEBACK}  File "/e/lib/python3.11/ssl.py", line 9, in f\n    raise TimeoutError(x)\n'
    )
    raised = "TimeoutError: timed out\n"
    bare, limit = "feed.errors.StepTimeoutError\n", "feed.errors.ShardTimeout: shard 7\n"
    busy = "ConnectionError: the feed is empty: service temporarily unavailable?\n"
    for said in (raised, "ConnectionError: the feed is gone\n", busy, bare, limit):
        assert diagnose(STEPS + own + said).verdict == "stop-user"
        assert diagnose(STEPS + deep + said).verdict == "retry"
    assert [diagnose(frames + bare).verdict for frames in (own, deep)] == ["stop-user", "retry"]


def test_a_class_of_the_scripts_own_counts_as_what_it_derives_from():
    bases = ("FeedGone", "ConnectionResetError", "ConnectionError", "OSError")
    said = "FeedGone: shard 7"
    live = RankFailure(rank=1, type="FeedGone", message=said, traceback=LOCAL + said, bases=bases)
    assert diagnose("", failures=(live,)).kind == "hub-unavailable"
    assert diagnose("", failures=(live._replace(bases=()),)).kind == "user-exception"


def test_what_a_peer_saw_of_it_does_not_decide():
    peer = "[rank0]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:4123\n"
    lost = f"{LOCAL}{REFUSED}\n"
    assert [diagnose(log).kind for log in (lost + peer, peer + lost)] == ["user-exception"] * 2
    assert diagnose(STEPS + lost + peer).kind == "hub-unavailable"
    assert diagnose(STEPS + lost).decided_by == ("log", "progress, as the log shows it")


CALLED = (
    f'{TRACEBACK}  File "/e/lib/python3.11/subprocess.py", line 571, in run\n'
    "    raise CalledProcessError(retcode, process.args,\n"
    "subprocess.CalledProcessError: Command '['fetch', 'a']' returned non-zero exit status 5.\n"
    "E1127 03:14:53.1 9 torch/distributed/elastic/multiprocessing/api.py:9] failed (exitcode: 1)\n"
)


def test_a_called_programs_last_words_decide_where_its_failure_ended_the_script():
    words = {
        "2026/11/27 03:14 failed: Get https://up/1: read tcp 10.0.0.4:1: i/o timeout": "retry",
        "fetch: error: server answered HTTP 503": "retry",
        "fetch: fatal: access denied (HTTP 403)": "stop-user",
        "fetch: error: unknown option --depth": "stop-user",
    }
    for said, verdict in words.items():
        found = diagnose(f"{said}\n{CALLED}{SUMMARY.format(rank=1, code=1)}")
        assert (found.verdict, found.root_line) == (verdict, said)
    timeout = next(iter(words))
    mistake = f"{timeout}\n{CALLED}{TRACEBACK}ValueError: a shard is missing\n"
    assert diagnose(mistake).verdict == "stop-user"


def test_a_message_that_begins_with_a_number_alone_is_shown_with_its_next_line():
    said = "columnlib.errors.ServerException: Code: 516."
    reason = "DB::Exception: Authentication failed: password is incorrect."
    assert diagnose(f"{LOCAL}{said}\n{reason}\n").root_line == f"{said} {reason}"


DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"


def test_what_a_library_made_of_a_time_limit_or_of_a_streams_end_tells_more():
    banner = f"{LOCAL}EOFError\n{DURING}{LOCAL}shelllib.SSHException: no banner\n"
    limit = f"{LOCAL}asyncio.exceptions.CancelledError\n{CAUSE}{LOCAL}TimeoutError\n"
    for log, line in ((banner, "shelllib.SSHException: no banner"), (limit, "TimeoutError")):
        found = diagnose(STEPS + log)
        assert (found.kind, found.root_line) == ("hub-unavailable", line)


def test_what_breaks_while_a_failed_script_cleans_up_is_not_the_cause():
    broken = "BrokenPipeError: [Errno 32] Broken pipe\n"
    calls = ("run.finish(exit_code=1)", "dist.destroy_process_group()", "self.log.close()")
    for call in calls:
        later = f'{TRACEBACK}  File "/w/train.py", line 9, in f\n    {call}\n{broken}'
        found = diagnose(f"{STEPS}{LOCAL}KeyError: 'mask'\n{DURING}{later}")
        assert (found.verdict, found.root_line) == ("stop-user", "KeyError: 'mask'")
    fetched = later.replace(call, "fetch(key)")
    assert diagnose(f"{STEPS}{LOCAL}KeyError: 'mask'\n{DURING}{fetched}").verdict == "retry"


def test_a_peer_that_was_missed_while_an_error_was_handled_explains_nothing_of_it():
    gone = "torch.distributed.DistNetworkError: failed to recv, got 0 bytes. Connection was closed."
    own = f"{LOCAL}ValueError: the mask does not fit\n{DURING}{LOCAL}{gone}\n"
    assert diagnose(STEPS + own).root_line == "ValueError: the mask does not fit"
    logging = f"--- Logging error ---\n{LOCAL}ValueError: I/O operation on closed file.\n"
    assert diagnose(f"{STEPS}{logging}{LOCAL}{gone}\n").kind == "peer-lost"
