"""A prefix that no list knows: a traceback shows it, and it is removed from every line."""

import pytest
from job_logs import diagnose, table

from saferun.diagnosis.reading import log_reader

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "/w/fit.py", line 61, in main',
    '    x = batch["mask"]',
    "KeyError: 'mask'",
]
PREFIXES = {
    "a node": "node07> ",
    "a job and its host": "job=77 host=n3 | ",
    "a name": "(trainer) ",
    "a number": "{n:4d}  ",
    "a quoted reply": "> ",
    "a counter in brackets": "[{n}|n3] ",
    "a time of its own": "10h{n:02d}m: ",
}


def carried(rows: list[str], prefix: str) -> str:
    return "\n".join(prefix.format(n=n) + row for n, row in enumerate(rows, 8))


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_a_log_means_the_same_behind_a_prefix_that_its_traceback_shows(prefix):
    rows = [row for row in table("kinds") if TRACEBACK[0] in row["log"] and 'File "' in row["log"]]
    for row in rows:
        alone = diagnose(row["log"], exit_code=row.get("exit_code"))
        found = diagnose(carried(row["log"].split("\n"), prefix), exit_code=row.get("exit_code"))
        assert found.kind == alone.kind, row["name"]
    assert len(rows) > 20


def test_lines_without_the_prefix_stay_as_they_are():
    log = log_reader.of_text("step 1\n" + carried(TRACEBACK, "node07> ") + "\nnode: done")
    assert [line.text for line in log.lines] == ["step 1", *TRACEBACK, "node: done"]
    assert log.lines[4].raw == "node07> KeyError: 'mask'"


FRAME = '  File "/w/fit.py", line {}, in main'
SHOWN = {
    "two frames": ["n> " + FRAME.format(n) for n in (1, 2)],
    "a head and the line below it": ["n> " + TRACEBACK[0], "n> x"],
    "a number in front": [f"{n}> " + FRAME.format(n) for n in (9, 10)],
    "aligned numbers in front": [f"{n:3d}> " + FRAME.format(n) for n in (99, 100)],
    "aligned numbers": [f"n {n:3d}> " + FRAME.format(n) for n in (9, 10)],
}


@pytest.mark.parametrize("rows", SHOWN.values(), ids=SHOWN)
def test_a_prefix_is_shown_by_two_frames_or_a_head_with_what_follows(rows):
    bare = [row.partition("> ")[2] for row in rows]
    assert [line.text for line in log_reader.of_text("\n".join(rows)).lines] == bare


ALONE = [
    [f"n> {TRACEBACK[0]}", "x"],
    ["n> " + FRAME.format(1)],
    [f"ERROR root: {TRACEBACK[0]}", *TRACEBACK[1:]],
]


@pytest.mark.parametrize("rows", ALONE)
def test_a_single_line_shows_no_prefix(rows):
    assert [line.text for line in log_reader.of_text("\n".join(rows)).lines] == rows


def test_a_progress_bar_before_a_head_is_no_prefix():
    rows = ["train  46%|####     | 31/67" + TRACEBACK[0], *TRACEBACK[1:]]
    assert diagnose("\n".join(rows)).kind == "user-exception"
