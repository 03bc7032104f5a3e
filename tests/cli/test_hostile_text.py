"""What others wrote reaches a terminal without anything that moves its cursor."""

import json
from pathlib import Path

import pytest

from saferun.__main__ import main
from saferun.system.printable import printable
from saferun.system.stderr import report

EVIL = "a\x1b[31mb\x9b2Jc\u202ed\u2066e\x7ff\x85g\u2028h\ud800i"


@pytest.fixture
def place(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_clean(text):
    return all(c.isprintable() or c in "\n\t" for c in text)


def test_every_character_that_moves_a_cursor_is_replaced():
    assert printable(EVIL) == "a?[31mb?2Jc?d?e?f?g?h?i"
    assert printable("a\tb\n", kept="\n") == "a?b\n"
    assert printable("x" * 9, 3) == "xxx"


PROFILE = 'schema: 1\ndescription: "\\e[31m\\u202e\\x9b"\nenv: {X: "\\e[2J\\u202e"}\n'
COMMANDS = (
    "profiles show ./p.yaml",
    "plan --profile ./p.yaml t.py",
    "plan --json --profile ./p.yaml t.py",
    *("diagnose log", "diagnose --explain log", "diagnose --json log"),
    *("runs list", "runs show last", "runs show --json last"),
    *("runs report last", "runs report --html - last", "runs report --json last"),
)


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_others_wrote_as_it_is(place, capsys, command):
    (place / "p.yaml").write_text(PROFILE, encoding="utf-8")
    (place / "log").write_text(f"RuntimeError: {EVIL}\n", errors="replace", encoding="utf-8")
    run = place / "home" / ".local/state/saferun/runs/20260101-000000-1"
    run.mkdir(parents=True)
    event = {"at": 1, "event": "ended", "attempt": 1, "root_line": EVIL, "kind": EVIL}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n", encoding="utf-8")
    main(command.split())
    seen = capsys.readouterr()
    assert seen.out
    assert is_clean(seen.out + seen.err), seen


@pytest.mark.parametrize("text", [f"{EVIL}: 1", "env: {X: 'a\x1b[2Jb'}", "when\u202e: 1"])
def test_an_error_in_a_profile_is_printed_clean_and_short(place, capsys, text):
    (place / "p.yaml").write_text(
        f"schema: 1\n{text}\n{'k' * 100_000}: 1\n", errors="replace", encoding="utf-8"
    )
    assert main(["plan", "--profile", "./p.yaml", "t.py"]) == 78
    seen = capsys.readouterr()
    assert is_clean(seen.err)
    assert len(seen.err) < 5000


def test_a_wrong_word_and_a_fault_of_ours_are_printed_clean(place, capsys):
    assert main(["env", EVIL]) == 2
    assert report(RuntimeError(EVIL)) == 70
    seen = capsys.readouterr()
    assert "Error: " in seen.err
    assert is_clean(seen.err)
