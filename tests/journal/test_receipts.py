"""What ranks leave behind, read back and judged; with real interpreters and a real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

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


def test_a_line_comes_back_with_what_the_hook_added(tmp_path: Path) -> None:
    put(tmp_path, "a2-r1-rank0-pid10.jsonl", line() + line(hook="init", missing=[3]))
    assert read(str(tmp_path), 2) == (
        Receipt(10, 0, 1, 5.5, "bootstrap", "applied", {}),
        Receipt(10, 0, 1, 5.5, "init", "applied", {"missing": [3]}),
    )


def test_restarts_then_ranks_come_in_order(tmp_path: Path) -> None:
    for restart, rank, pid in [(1, 0, 7), (0, 10, 6), (0, 2, 5), (0, None, 9)]:
        name = f"a1-r{restart}-rank{'none' if rank is None else rank}-pid{pid}.jsonl"
        put(tmp_path, name, line(rank=rank, pid=pid))
    found = [(r.restart, r.rank, r.pid) for r in read(str(tmp_path), 1)]
    assert found == [(0, None, 9), (0, 2, 5), (0, 10, 6), (1, 0, 7)]


@pytest.mark.parametrize(
    "name",
    [
        "a2-r0-rank0-pid10.jsonl",
        "a11-r0-rank0-pid10.jsonl",
        "a1-r0-rank0-pid10.jsonl.swp",
        ".a1-r0-rank0-pid10.jsonl",
        "a1-rX-rank0-pid10.jsonl",
        "plan.json",
        "a1-r0-rank\N{ARABIC-INDIC DIGIT ONE}-pid10.jsonl",
    ],
)
def test_other_attempts_and_other_files_are_not_read(tmp_path: Path, name: str) -> None:
    put(tmp_path, name, line())
    assert read(str(tmp_path), 1) == ()


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\n",
        b"\xff\xfe\x00garbage\n",
        b'{"v": 1, "at": 5.5, "pid": 10, "ra\n',
        b"[" * 50_000 + b"\n",
        b"[1, 2]\n",
        line(v=2),
        line(pid="10"),
        line(pid=-1),
        line(pid=True),
        line(rank="0"),
        line(rank=10**12),
        line(at="now"),
        line(at=10**400),
        line(hook=None),
        line(outcome=["applied"]),
        b'{"v": 1, "at": ' + b"9" * 5000 + b"}\n",
    ],
    ids=lambda value: repr(value[:40]),
)
def test_what_is_no_receipt_is_left_out_and_its_neighbours_are_read(
    tmp_path: Path, bad: str | bytes
) -> None:
    bad = bad.encode() if isinstance(bad, str) else bad
    put(tmp_path, "a1-r0-rank0-pid10.jsonl", line().encode() + bad + line(hook="init").encode())
    assert [r.hook for r in read(str(tmp_path), 1)] == ["bootstrap", "init"]


def test_a_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    whole = line()
    put(tmp_path, "a1-r0-rank0-pid10.jsonl", whole + line(hook="init")[:-1])
    assert [r.hook for r in read(str(tmp_path), 1)] == ["bootstrap"]


@pytest.mark.parametrize("where", [None, "/proc/nowhere", "/dev/null", ""])
def test_a_missing_directory_holds_nothing(where: str | None) -> None:
    assert read(where, 1) == ()


def test_links_pipes_and_folders_are_not_followed(tmp_path: Path) -> None:
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_files_of_other_users_are_not_believed(tmp_path: Path) -> None:
    os.chown(put(tmp_path, "a1-r0-rank0-pid1.jsonl", line()), 12345, -1)
    assert read(str(tmp_path), 1) == ()


@pytest.mark.parametrize("files", [1, 200], ids=["one file", "many files"])
def test_a_hundred_thousand_lines_are_read_up_to_a_bound_and_in_bounded_memory(
    tmp_path: Path, files: int
) -> None:
    text = line(hook="order", text="x" * 100) * (100_000 // files)
    for pid in range(files):
        put(tmp_path, f"a1-r0-rank0-pid{pid}.jsonl", line(pid=pid) + text)
    tracemalloc.start()
    found = read(str(tmp_path), 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found[0].hook == "bootstrap"
    assert len(found) <= receipts.MAX_LINES
    assert peak < 64 << 20


def test_one_full_file_hides_no_other_rank(tmp_path: Path) -> None:
    put(tmp_path, "a1-r0-rank0-pid1.jsonl", line() * 100_000)
    put(tmp_path, "a1-r0-rank1-pid2.jsonl", line(rank=1, pid=2))
    assert {r.rank for r in read(str(tmp_path), 1)} == {0, 1}


# the pids of ranks


def ended(rank: int, **more: int) -> Receipt:
    return started(rank, **more)._replace(outcome="finished")


@pytest.mark.parametrize(
    ("reported", "finished"),
    [
        ((), False),
        ((started(0, size=2), started(1, size=2)), False),
        ((started(0, size=2), ended(0, size=2)), False),
        ((started(0, size=2), started(1, size=2), ended(1, size=2)), False),
        ((started(0, size=2), started(1, size=2), ended(0, size=2), ended(1, size=2)), True),
        ((ended(0, size=1), started(0, size=1, restart=1)), False),
    ],
    ids=["silence", "begun", "one unheard", "one at work", "all", "a restart began anew"],
)
def test_a_job_has_finished_when_each_of_its_ranks_has(
    reported: tuple[Receipt, ...], finished: bool
) -> None:
    assert receipts.finished(reported) is finished


# the judgement


@pytest.mark.parametrize(
    ("given", "known", "messages"),
    [
        ([], {}, [NOWHERE]),
        ([], {"expects_hooks": False}, []),
        ([], {"ranks_ran": False}, []),
        ([], {"no_python": True}, []),
        ([left(None, "compile")], {}, [NOWHERE]),
        ([started(r) for r in range(4)], {}, []),
        ([started(0), started(2)], {}, ["the hooks did not run in ranks 1, 3, "]),
        ([started(0), started(2)], {"no_python": True}, ["the hooks did not run in ranks 1, 3, "]),
        ([started(0), started(2)], {"ranks_ran": False}, []),
        ([started(0), started(2)], {"expects_hooks": False}, []),
        ([started(5), started(6), started(7)], {}, ["the hooks did not run in rank 4, "]),
        ([started(3, size=8)], {}, ["the hooks did not run in ranks 0-2, 4-7, "]),
        ([started(0, size=2), left(1, "init")], {}, []),
        ([started(0, size=2), started(1, size=2, restart=1)], {}, []),
        ([left(0, "init")], {}, []),
    ],
    ids=[
        *("none", "no hooks expected", "no rank ran", "no python"),
        *("only a process without a rank", "all", "some", "some without python"),
        *("some, too early to know", "some, no hooks expected", "second machine"),
        *("rows of ranks", "known by another hook", "known by a restart", "sizes unknown"),
    ],
)
def test_ranks_without_a_word_are_told(
    given: list[Receipt], known: dict[str, bool], messages: list[str]
) -> None:
    lines = judge(given, **{**KNOWN, **known})
    assert [text[: len(begin)] for text, begin in zip(lines, messages, strict=True)] == messages


def test_a_failed_hook_is_told_once_with_its_ranks_and_its_error() -> None:
    failures = [left(r, "compile", "failed", error=f"ValueError: {r}\n\x1b[31m") for r in (3, 1, 2)]
    given = [*(started(r) for r in range(4)), *failures]
    (messages,) = judge(given, **KNOWN)
    assert (
        messages == "hook compile failed in ranks 1-3 and does not hold there: ValueError: 3 ?[31m"
    )


def test_never_more_than_three_lines() -> None:
    given = [started(0), *(left(0, hook, "failed", error="E") for hook in "abcd")]
    messages = judge(given, **KNOWN)
    assert [text[:20] for text in messages] == [
        "the hooks did not ru",
        "hook a failed in ran",
        "3 more hooks failed;",
    ]
    assert len(judge(given[1:3], **KNOWN)) == 2


# real ranks


def torchrun(tmp_path: Path, *argv: str, **extra: str) -> tuple[Receipt, ...]:
    """Run two ranks that do nothing, under our hooks, and read what they left."""
    (tmp_path / "train.py").write_text("pass")
    hooks, place = as_tree(HookSettings()), str(tmp_path / "receipts")
    text = contract.encode(run="r", attempt=1, hooks=hooks, mitigations=[], receipts=place)
    dropped = ("SAFERUN_", "TORCH", "PYTHON", "PET_", "RANK", "LOCAL_", "WORLD_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    environ = {**kept, "PYTHONPATH": str(SITE), "SAFERUN_INJECT": text, "OMP_NUM_THREADS": "1"}
    command = [TORCHRUN, "--standalone", "--nproc-per-node=2", *argv, str(tmp_path / "train.py")]
    subprocess.run(command, env={**environ, **extra}, check=True, capture_output=True, timeout=500)
    return read(str(tmp_path / "receipts"), 1)


def python_exec(tmp_path: Path, body: str) -> str:
    wrapper = tmp_path / "my-python"
    wrapper.write_text(f"#!/bin/bash\n{body}\n")
    wrapper.chmod(0o755)
    return str(wrapper)


def test_both_ranks_of_a_real_job_leave_their_word(tmp_path: Path) -> None:
    found = torchrun(tmp_path)
    assert [(r.rank, r.hook, r.outcome) for r in found] == [
        (rank, "bootstrap", outcome) for rank in (0, 1) for outcome in ("applied", "finished")
    ]
    assert receipts.finished(found)
    assert judge(found, **KNOWN) == ()


def test_a_script_that_numbers_its_device_anew_makes_no_rank_of_it() -> None:
    end = ended(1, size=2)._replace(facts={"local_rank": 0, "local_world_size": 2})
    assert judge((started(0, size=2), started(1, size=2), end), **KNOWN) == ()


@pytest.mark.slow
def test_python_dash_i_in_every_rank_is_found_out(tmp_path: Path) -> None:
    isolated = python_exec(tmp_path, f'exec {sys.executable} -I "$@"')
    found = torchrun(tmp_path, PYTHON_EXEC=isolated)
    (messages,) = judge(found, **KNOWN)
    assert messages.startswith(NOWHERE)


def test_python_dash_i_in_one_rank_is_found_out_by_name(tmp_path: Path) -> None:
    body = f'if [ "$RANK" = 1 ]; then set -- -I "$@"; fi; exec {sys.executable} "$@"'
    found = torchrun(tmp_path, PYTHON_EXEC=python_exec(tmp_path, body))
    (messages,) = judge(found, **KNOWN)
    assert messages.startswith("the hooks did not run in rank 1, though in others")


# modules that were loaded past the hooks

KERNELS = "torch._inductor.runtime.triton_heuristics"


def reported(rank: int | None, state: str, restart: int = 0) -> Receipt:
    found = Receipt(100 + (rank or 0), rank, restart, 2.0, "targets", "observed", {})
    return found._replace(facts={"targets": {KERNELS: state, "torch": "applied"}})


@pytest.mark.parametrize(
    ("receipts_", "expected"),
    [
        ([reported(0, "applied"), reported(1, "not imported")], {}),
        ([reported(0, "missed"), reported(2, "missed")], {KERNELS: {0, 2}}),
        ([reported(None, "missed")], {KERNELS: set()}),
        ([reported(0, "not imported"), reported(0, "missed")], {KERNELS: {0}}),
        ([reported(0, "missed"), reported(0, "applied")], {}),
        ([reported(0, "missed"), reported(0, "applied", restart=1)], {}),
        ([left(0, "targets", "observed", targets=["missed"])], {}),
        ([left(0, "targets", "observed", targets={"os": "missed"})], {}),
    ],
    ids=["none", "two", "no rank", "later", "hooked later", "restart", "odd", "not ours"],
)
def test_what_was_missed_is_the_last_state_of_each_process(
    receipts_: list[Receipt], expected: dict[str, set[int]]
) -> None:
    assert receipts.missed(receipts_) == expected


@pytest.mark.parametrize("needed", [{KERNELS}, set()])
def test_a_missed_module_is_reported_where_a_setting_needs_it(needed: set[str]) -> None:
    found = [started(0, size=1), reported(0, "missed")]
    lines = judge(found, **KNOWN, needed=needed)
    assert [KERNELS in line and "rank 0" in line for line in lines] == [True] * len(needed)


# NCCL


def nccl(rank: int, version: str = "2.32.3", size: int = 2) -> Receipt:
    return left(rank, "init", "observed", nccl=version, world_size=size)


def test_the_version_of_nccl_is_known_where_all_ranks_of_the_job_are_here() -> None:
    both = [nccl(0), nccl(1), left(0, "init"), left(1, "init")]
    assert receipts.nccl(both) == ("2.32.3", 2)
    assert receipts.nccl([*both, nccl(0)]) == ("2.32.3", 2), "a group that was made again"


@pytest.mark.parametrize(
    "found",
    [
        pytest.param([], id="no rank has begun"),
        pytest.param([left(0, "init"), left(1, "init")], id="no NCCL"),
        pytest.param([nccl(0)], id="a rank has not begun"),
        pytest.param([nccl(0, size=4), nccl(1, size=4)], id="ranks of another machine"),
        pytest.param([nccl(0), nccl(1, "2.30.7")], id="two versions"),
        pytest.param([left(0, "init", "observed", nccl=3, world_size=1)], id="no text"),
        pytest.param([left(0, "init", "observed", nccl="2.32.3", world_size="x")], id="no count"),
    ],
)
def test_elsewhere_it_is_not(found: list[Receipt]) -> None:
    assert receipts.nccl(found) == ("", 0)
