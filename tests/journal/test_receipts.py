"""What ranks leave behind, read back and judged; with real interpreters and a real torchrun."""

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import rights
from cases import check_cases
from sandbox import executable, shell

from saferun.inject import contract
from saferun.journal import receipts
from saferun.journal.receipts import Receipt, judge, read
from saferun.model import as_tree
from saferun.settings import HookSettings

SITE = Path(contract.__file__).with_name("site")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
NOWHERE = "the hooks did not run in any rank"
KNOWN = {"expects_hooks": True, "ranks_ran": True, "no_python": False}


def line(**changes: object) -> str:
    head = {"v": 1, "at": 5.5, "pid": 10, "rank": 0, "hook": "bootstrap", "outcome": "applied"}
    return json.dumps({**head, **changes}) + "\n"


def put(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def started(rank: int, *, size: int = 4, restart: int = 0, pid: int | None = None) -> Receipt:
    facts = {"local_rank": rank % size, "local_world_size": size}
    return Receipt(pid or 100 + rank, rank, restart, 1.0, "bootstrap", "applied", facts)


def left(rank: int | None, hook: str, outcome: str = "applied", **facts: object) -> Receipt:
    return Receipt(100 + (rank or 0), rank, 0, 2.0, hook, outcome, facts)


# reading

READ = ((None, 9), (2, 5), (10, 6))


def test_lines_come_back_by_restart_and_rank_with_what_the_hook_added(tmp_path):
    put(tmp_path, "a1-r1-rank0-pid10.jsonl", line() + line(hook="init", missing=[3]))
    for rank, pid in ((10, 6), (2, 5), (None, 9)):
        name = f"a1-r0-rank{'none' if rank is None else rank}-pid{pid}.jsonl"
        put(tmp_path, name, line(rank=rank, pid=pid) + line(hook="cut")[:-1])
    assert read(str(tmp_path), 1) == (
        *(Receipt(pid, r, 0, 5.5, "bootstrap", "applied", {}) for r, pid in READ),
        Receipt(10, 0, 1, 5.5, "bootstrap", "applied", {}),
        Receipt(10, 0, 1, 5.5, "init", "applied", {"missing": [3]}),
    )


def test_other_files_are_not_read(tmp_path):
    for name in (
        "a2-r0-rank0-pid10.jsonl",
        "a11-r0-rank0-pid10.jsonl",
        "a1-r0-rank0-pid10.jsonl.swp",
        ".a1-r0-rank0-pid10.jsonl",
        "a1-rX-rank0-pid10.jsonl",
        "a1-r0-rank\N{ARABIC-INDIC DIGIT ONE}-pid10.jsonl",
    ):
        put(tmp_path, name, line())
    if not rights.missing("become others"):
        os.chown(put(tmp_path, "a1-r0-rank0-pid1.jsonl", line()), rights.OTHER, -1)
    for where in (str(tmp_path), None, "/proc/nowhere", "/dev/null", ""):
        assert read(where, 1) == ()


BAD: list[str | bytes] = [
    *(b"", b"\n", b"\xff\xfe\x00garbage\n", b'{"v": 1, "at": 5.5, "pid": 10, "ra\n'),
    *(b"[" * 50_000 + b"\n", b"[1, 2]\n", b'{"v": 1, "at": ' + b"9" * 5000 + b"}\n"),
    *(line(v=2), line(pid="10"), line(pid=-1), line(pid=True), line(rank="0")),
    *(line(rank=10**12), line(at="now"), line(at=10**400), line(hook=None), line(outcome=["a"])),
]


def test_what_is_no_receipt_is_left_out_and_its_neighbours_are_read(tmp_path):
    for bad in BAD:
        text = bad.encode() if isinstance(bad, str) else bad
        whole = line().encode() + text + line(hook="init").encode()
        put(tmp_path, "a1-r0-rank0-pid10.jsonl", whole)
        assert [r.hook for r in read(str(tmp_path), 1)] == ["bootstrap", "init"], bad[:40]


def test_links_pipes_and_folders_are_not_followed(tmp_path):
    target = put(tmp_path, "elsewhere", line())
    folder = tmp_path / "receipts"
    folder.mkdir()
    (folder / "a1-r0-rank0-pid1.jsonl").symlink_to(target)
    os.mkfifo(folder / "a1-r0-rank0-pid2.jsonl")
    os.mkfifo(folder / "a1-r0-rank0-pid4.jsonl")
    (folder / "a1-r0-rank0-pid3.jsonl").mkdir()
    full = os.open(folder / "a1-r0-rank0-pid2.jsonl", os.O_RDWR)
    os.write(full, line().encode())
    assert read(str(folder), 1) == ()
    os.close(full)


@pytest.mark.parametrize("files", [1, 200], ids=["one file", "many files"])
def test_a_hundred_thousand_lines_are_read_up_to_a_bound_and_in_bounded_memory(tmp_path, files):
    text = line(hook="order", text="x" * 100) * (100_000 // files)
    for pid in range(files):
        put(tmp_path, f"a1-r0-rank0-pid{pid}.jsonl", line(pid=pid) + text)
    put(tmp_path, "a1-r0-rank1-pid999.jsonl", line(rank=1, pid=999))
    tracemalloc.start()
    found = read(str(tmp_path), 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[0].hook == "bootstrap"
    assert files > 1 or found[-1].rank == 1, "a full file hides no other rank"
    assert len(found) <= receipts.MAX_LINES
    assert peak < 64 << 20


# the pids of ranks


def ended(rank: int, **more: int) -> Receipt:
    return started(rank, **more)._replace(outcome="finished")


def test_a_job_has_finished_when_each_of_its_ranks_has():
    both = (started(0, size=2), started(1, size=2))
    for reported, finished in (
        ((), False),
        (both, False),
        ((*both, ended(1, size=2)), False),
        ((started(0, size=2), ended(0, size=2)), False),  # one is unheard of
        ((*both, ended(0, size=2), ended(1, size=2)), True),
        ((ended(0, size=1), started(0, size=1, restart=1)), False),
    ):
        assert receipts.finished(reported) is finished
    # A script that numbers its device anew makes no rank of it.
    end = ended(1, size=2)._replace(facts={"local_rank": 0, "local_world_size": 2})
    assert judge((*both, end), **KNOWN) == ()


# the judgement


SOME = [started(0), started(2)]
MISSING = [NOWHERE], ["the hooks did not run in ranks 1, 3, "]
TOLD = {
    "none": ([], {}, MISSING[0]),
    "no hooks expected": ([], {"expects_hooks": False}, []),
    "no rank ran": ([], {"ranks_ran": False}, []),
    "no python": ([], {"no_python": True}, []),
    "only a process without a rank": ([left(None, "compile")], {}, MISSING[0]),
    "all": ([started(r) for r in range(4)], {}, []),
    "some": (SOME, {}, MISSING[1]),
    "some without python": (SOME, {"no_python": True}, MISSING[1]),
    "some, too early to know": (SOME, {"ranks_ran": False}, []),
    "rows of ranks": ([started(3, size=8)], {}, ["the hooks did not run in ranks 0-2, 4-7, "]),
    "known by another hook": ([started(0, size=2), left(1, "init")], {}, []),
    "known by a restart": ([started(0, size=2), started(1, size=2, restart=1)], {}, []),
    "sizes unknown": ([left(0, "init")], {}, []),
    "too many": (
        [started(0), *(left(0, hook, "failed", error="E") for hook in "abcd")],
        {},
        ["the hooks did not run in", "hook a failed in ran", "3 more hooks failed;"],
    ),
}


def test_ranks_without_a_word_are_told():
    def check(given: list[Receipt], known: dict[str, bool], messages: list[str]) -> None:
        lines = judge(given, **{**KNOWN, **known})
        assert [t[: len(begin)] for t, begin in zip(lines, messages, strict=True)] == messages

    check_cases(TOLD, check)


def test_a_failed_hook_is_told_once_with_its_ranks_and_its_error():
    failures = [left(r, "compile", "failed", error=f"ValueError: {r}\n\x1b[31m") for r in (3, 1, 2)]
    given = [*(started(r) for r in range(4)), *failures]
    (messages,) = judge(given, **KNOWN)
    assert (
        messages == "hook compile failed in ranks 1-3 and does not hold there: ValueError: 3 ?[31m"
    )


# real ranks


def torchrun(tmp_path: Path, *argv: str, **extra: str) -> tuple[Receipt, ...]:
    """Run two ranks that do nothing, under our hooks, and read what they left."""
    (tmp_path / "train.py").write_text("pass", encoding="utf-8")
    hooks, place = as_tree(HookSettings()), str(tmp_path / "receipts")
    text = contract.encode(run="r", attempt=1, hooks=hooks, mitigations=[], receipts=place)
    environ = {**os.environ, "PYTHONPATH": str(SITE), "SAFERUN_INJECT": text}
    command = [TORCHRUN, "--standalone", "--nproc-per-node=2", *argv, str(tmp_path / "train.py")]
    subprocess.run(command, env={**environ, **extra}, check=True, capture_output=True, timeout=500)
    return read(str(tmp_path / "receipts"), 1)


def python_exec(tmp_path: Path, body: str) -> str:
    return str(executable(tmp_path / "my-python", f"#!/bin/bash\n{body}\n"))


def test_both_ranks_of_a_real_job_leave_their_word(tmp_path):
    found = torchrun(tmp_path)
    assert [(r.rank, r.hook, r.outcome) for r in found] == [
        (rank, "bootstrap", outcome) for rank in (0, 1) for outcome in ("applied", "finished")
    ]
    assert receipts.finished(found)
    assert judge(found, **KNOWN) == ()


@pytest.mark.slow
def test_python_dash_i_in_every_rank_is_found_out(tmp_path):
    isolated = python_exec(tmp_path, f'exec {shell(sys.executable)} -I "$@"')
    found = torchrun(tmp_path, PYTHON_EXEC=isolated)
    (messages,) = judge(found, **KNOWN)
    assert messages.startswith(NOWHERE)


def test_python_dash_i_in_one_rank_is_found_out_by_name(tmp_path):
    body = f'if [ "$RANK" = 1 ]; then set -- -I "$@"; fi; exec {shell(sys.executable)} "$@"'
    found = torchrun(tmp_path, PYTHON_EXEC=python_exec(tmp_path, body))
    (messages,) = judge(found, **KNOWN)
    assert messages.startswith("the hooks did not run in rank 1, though in others")


# modules that were loaded past the hooks

KERNELS = "torch._inductor.runtime.triton_heuristics"


def reported(rank: int | None, state: str, restart: int = 0) -> Receipt:
    found = Receipt(100 + (rank or 0), rank, restart, 2.0, "targets", "observed", {})
    return found._replace(facts={"targets": {KERNELS: state, "torch": "applied"}})


MISSED = {
    "none": ([reported(0, "applied"), reported(1, "not imported")], {}),
    "two": ([reported(0, "missed"), reported(2, "missed")], {KERNELS: {0, 2}}),
    "no rank": ([reported(None, "missed")], {KERNELS: set()}),
    "later": ([reported(0, "not imported"), reported(0, "missed")], {KERNELS: {0}}),
    "hooked later": ([reported(0, "missed"), reported(0, "applied")], {}),
    "restart": ([reported(0, "missed"), reported(0, "applied", restart=1)], {}),
    "odd": ([left(0, "targets", "observed", targets=["missed"])], {}),
    "not ours": ([left(0, "targets", "observed", targets={"os": "missed"})], {}),
}


def test_a_module_that_was_missed_is_reported_where_a_setting_needs_it():
    def check(given: list[Receipt], expected: dict[str, set[int]]) -> None:
        assert receipts.missed(given) == expected

    check_cases(MISSED, check)
    found = [started(0, size=1), reported(0, "missed")]
    assert judge(found, **KNOWN) == ()
    (line,) = judge(found, **KNOWN, needed={KERNELS})
    assert (KERNELS in line, "rank 0" in line) == (True, True)


# NCCL


def nccl(rank: int, version: str = "2.32.3", size: int = 2) -> Receipt:
    return left(rank, "init", "observed", nccl=version, world_size=size)


def test_the_version_of_nccl_is_known_where_all_ranks_of_the_job_are_here():
    both = [nccl(0), nccl(1), left(0, "init"), left(1, "init")]
    assert receipts.nccl(both) == ("2.32.3", 2)
    assert receipts.nccl([*both, nccl(0)]) == ("2.32.3", 2), "a group that was made again"
    for found in (
        [left(0, "init"), left(1, "init")],
        [nccl(0)],  # a rank has not begun
        [nccl(0, size=4), nccl(1, size=4)],  # others are on another machine
        [nccl(0), nccl(1, "2.30.7")],
        [left(0, "init", "observed", nccl=3, world_size=1)],
        [left(0, "init", "observed", nccl="2.32.3", world_size="x")],
    ):
        assert receipts.nccl(found) == ("", 0)
