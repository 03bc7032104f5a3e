"""Exceptions in a log: which lines are one, how they hang together, which one is the root."""

# ruff: noqa: E501 (what programs print is not wrapped)

import pytest
from job_logs import TRACEBACK, diagnose

from saferun.diagnosis.reading import log_reader, tracebacks


def test_names_in_a_table_and_frames_alone_are_no_exception():
    assert diagnose("KeyError        3\nValueError      12\n").kind == "unknown"
    frames = '  File "/w/a.py", line 3, in start\n    begin(x)\n'
    found = diagnose("the loader failed to start\n" + frames)
    assert (found.kind, found.root_line) == ("unknown", "the loader failed to start")


CUT = '  File "/w/a.py", line 3, in f\n    raise ValueError(\n'
BOX = "│ /w/a.py:12 in f │\n│ ❱ 12 │   raise ValueError( │\n│   13 │   x │\n"
RANKED = "[rank1]: " + (TRACEBACK + "KeyError: a").replace("\n", "\n[rank1]: ")
HEADED = "╭── Traceback (most recent call last) ──╮\n"
# A log, and of its exceptions: the line, the type, whether a traceback stood above, the text.
EXCEPTIONS = {
    "a program's line below frames": (TRACEBACK + "loader: syncing\n", (2, "", True, "main()")),
    "frames, cut": (TRACEBACK + "\n", (2, "", True, "main()")),
    "a raise without its head, cut": (CUT + "\n\n", (1, "ValueError", False, "raise ValueError(")),
    "a box without its head, cut": (BOX, (1, "ValueError", False, "❱ 12 │   raise ValueError(")),
    "a box, cut": (HEADED + BOX, (2, "ValueError", False, "❱ 12 │   raise ValueError(")),
    "what any program prints": ("Error: no\nusage: -x\n", (0, "Error", False, "Error: no")),
    "quoted": ('bad: AException("b")\n', (0, "AException", False, 'bad: AException("b")')),
    "a call below frames": (TRACEBACK + "KeyError('x') in f", (3, "KeyError", True, "KeyError('x') in f")),
    "a name alone": ("KeyError\n", (0, "KeyError", False, "KeyError")),
    "a quoted error": ('bad: AError("b")\n', (0, "AError", False, 'bad: AError("b")')),
    "a name without its newline": ("KeyErrorKeyError: a", (0, "KeyError", False, "KeyErrorKeyError: a")),
    "an indented message": ("KeyError: a\n    b", (0, "KeyError", False, "KeyError: a\nb")),
    "a rank's": (RANKED, (3, "KeyError", True, "KeyError: a")),
    "below frames without a head": (CUT + "x\n" + TRACEBACK + "KeyError: a", (6, "KeyError", True, "KeyError: a")),
    "two, the first cut": (TRACEBACK * 2 + "KeyError: a", (2, "", True, "main()"), (6, "KeyError", True, "KeyError: a")),
}  # fmt: skip


@pytest.mark.parametrize(
    ("log", "ones"), [(log, ones) for log, *ones in EXCEPTIONS.values()], ids=EXCEPTIONS
)
def test_where_an_exception_stands_and_what_it_says(log, ones):
    found = tracebacks.find(log_reader.of_text(log).lines)
    assert [(r.at, r.type, r.headed, r.text) for r in found.raised] == ones
    assert [(type(r.frames), r.background) for r in found.raised] == [(str, False)] * len(ones)
    assert all(kind != "ValueError" or at not in found.framed for at, kind, _, _ in ones)
    assert diagnose(log, exit_code=1).root_line


def test_of_many_exceptions_the_first_and_the_last_are_kept():
    most = tracebacks.MOST
    log = log_reader.of_text("".join(f"KeyError: {n}\n" for n in range(3 * most)))
    found = [int(raised.text.split()[1]) for raised in tracebacks.find(log.lines).raised]
    assert found == [*range(most), *range(2 * most, 3 * most)]


def test_interleaved_ranks_are_read_apart():
    aborted = "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0."
    one, two = (f"{TRACEBACK}{line}".splitlines() for line in ("IndexError: a", aborted))
    log = "\n".join(f"[rank1]: {a}\n[rank0]: {b}" for a, b in zip(one, two, strict=True))
    assert diagnose(log).root_line == "[rank1]: IndexError: a"


def test_a_message_that_begins_on_the_next_line_is_in_the_root_line():
    log = TRACEBACK + "RuntimeError: \n  ====\n  An attempt has been made to start\n  Then more\n"
    assert diagnose(log).root_line == "RuntimeError: An attempt has been made to start"


CAUSED = "The above exception was the direct cause of the following exception:"
DURING = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(
    ("first", "link", "last", "root"),
    [
        ("ConnectionError: no route", CAUSED, "OSError: cannot load", 0),
        ("ValueError: bad shard", DURING, "RuntimeError: cleanup failed", 0),
        ("KeyError: 'llava'", DURING, "ValueError: unknown model type llava", 1),
    ],
    ids=["direct cause: the first", "while handling: the first", "after a lookup: the last"],
)
def test_the_root_of_a_chain_of_exceptions(first, link, last, root):
    found = diagnose(f"{TRACEBACK}{first}\n\n{link}\n\n{TRACEBACK}{last}\n")
    assert found.root_line == (first, last)[root]


@pytest.mark.parametrize("pointer", ["See root cause above.", "See stack trace for root cause."])
def test_a_wrapper_that_points_to_the_root_elsewhere_is_not_it(pointer):
    log = TRACEBACK + f"RuntimeError: Engine core initialization failed. {pointer}\n"
    assert diagnose(log).kind == "child-failed-no-root"
    assert diagnose("worker 2 received SIGKILL\n" + log).kind == "host-oom-killed"


def test_an_exception_in_a_thread_does_not_end_a_job():
    reset = "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    thread = f"Exception in thread Thread-3:\n{TRACEBACK}{reset}"
    assert diagnose(f"{thread}{TRACEBACK}KeyError: 'b'").root_line == "KeyError: 'b'"


def test_a_killed_launcher_outweighs_what_a_helper_thread_saw_of_the_end():
    thread = (
        "Traceback (most recent call last):\n"
        '  File "/python/multiprocessing/resource_sharer.py", line 138, in _serve\n'
        "    with self._listener.accept() as conn:\n"
        '  File "/python/multiprocessing/connection.py", line 395, in _recv\n'
        "    chunk = read(handle, remaining)\n"
        "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    )
    killed = diagnose(thread, exit_code=137, oom_kills=0)
    assert (killed.kind, killed.verdict) == ("killed-from-outside", "retry")
    assert diagnose(thread + TRACEBACK + "KeyError: 'b'").root_line == "KeyError: 'b'"
