"""`saferun runs show`: a run, attempt by attempt, for people and for programs."""

import json

from sandbox import shell
from user_machine import (
    FAILED_HOOK,
    MITIGABLE,
    NO_SHM,
    NOW,
    OK,
    WRONG,
    event,
    finished,
    journal,
    whole_page,
)

from saferun.journal import reader as runs


def test_a_run_is_shown_attempt_by_attempt(machine):
    place = machine.launch(MITIGABLE, WRONG, command_line=("train.py", "--lr", "1"))
    page = machine.ask("show", place.name)
    for part in (
        f"run {place.name}: failed: user-exception (The script ended with an exception of its own ",
        f"{shell(machine.folder / 'bin/torchrun')} train.py --lr 1",
        "profile   cpu (launcher: torchrun)",
        f"journal   {place}",
    ):
        assert part in page
    first, second = page.split("\nattempt ")[1:]
    assert "status 1" in first
    assert "failure   nccl-shm-failed" in first
    assert "line      [rank1]: Error while creating shared memory segment" in first
    assert "decision  again: with nccl-shm-off" in first
    assert f"tail      {place}/attempt-1.stderr ({len(NO_SHM)} B)" in first
    assert "changed" not in first
    assert "with      nccl-shm-off" in second
    assert "changed   NCCL_SHM_DISABLE=1\n" in second
    assert "line      [rank1]: KeyError: 'label'" in second
    assert "decision  stop: the same command would fail again" in second


def test_a_run_is_shown_for_programs(machine):
    place = machine.launch({**MITIGABLE, "receipt": FAILED_HOOK}, OK)
    reported = json.loads(machine.ask("show", "--json", "last"))
    assert (reported["schema"], reported["run"]["id"]) == (1, place.name)
    assert reported["plan"]["script"] == "train.py"
    first, second = reported["attempts"]
    assert (first["kind"], first["action"], first["status"]) == ("nccl-shm-failed", "again", 1)
    assert first["tails"] == [{"path": f"{place}/attempt-1.stderr", "bytes": len(NO_SHM)}]
    assert (second["kind"], second["action"], second["status"]) == ("", "done", 0)
    assert (second["mitigations"], second["changed"]) == (["nccl-shm-off"], ["NCCL_SHM_DISABLE=1"])
    assert first["started_at"] <= second["started_at"]
    shown = machine.ask("show", "last")
    assert "hook compile failed in rank 3 and does not hold there: no such attribute" in shown


def test_rank_and_whole_line_are_shown_where_the_journal_has_them(tmp_path):
    facts = {"root_rank": 3, "root_line": "segment /dev/shm/nccl-1", "fingerprint": "k: segment P"}
    journal(tmp_path, "r", event("ended", attempt=1, status=1, kind="k", action="stop", **facts))
    page = whole_page(tmp_path)
    assert "failure   k on rank 3" in page
    assert "line      segment /dev/shm/nccl-1" in page


def test_no_secret_is_shown(machine):
    secret = "hf_abcdefghijklmnopqrstuvwxyz012345"
    command_line = ("--set", f"env.MY_TOKEN={secret}", "train.py", "--api-key", secret)
    machine.launch(
        {**MITIGABLE, "says": NO_SHM + f"token={secret}\n"}, OK, command_line=command_line
    )
    reported = [
        machine.ask(*w) for w in (["show", "last"], ["list", "--json"], ["show", "last", "--json"])
    ]
    reported += [machine.ask("mitigations", "list"), machine.ask("mitigations", "list", "--json")]
    assert "MY_TOKEN='***'" in reported[0]
    assert "--api-key" in reported[3]
    assert all(secret not in text for text in reported)


def test_a_run_is_named_by_id_by_its_beginning_by_last_or_by_its_path(tmp_path):
    for name, at in (("20260101-1", NOW), ("20260101-12", NOW + 5), ("20260202-1", NOW + 1)):
        finished(tmp_path, name, at)
    base = str(tmp_path)
    for word, name in (
        ("20260101-1", "20260101-1"),  # whole, although it begins another
        ("202602", "20260202-1"),
        ("last", "20260101-12"),
        (f"{base}/20260202-1/", "20260202-1"),
    ):
        assert runs.named(base, word, NOW).id == name


UNKNOWN = {
    "20260203-1": ["no run `20260203-1`", "did you mean `20260202-1`?"],
    "2026": ["2 runs begin with `2026`", "20260101-1, 20260202-1"],
    "nonsense": ["no run `nonsense`", "did you mean `20"],
    "": ["no run ``"],
    "../work": ["this directory does not belong to a run", "../work"],
    "./20260202-2": ["no run `20260202-2`"],
}


def test_an_unknown_run_is_said_with_the_nearest(machine):
    for word in ("last", "x"):
        assert "there is no run yet" in machine.ask("show", word, status=2)
    finished(machine.runs, "20260101-1", NOW)
    finished(machine.runs, "20260202-1", NOW)
    for word, parts in UNKNOWN.items():
        messages = machine.ask("show", word, status=2)
        assert messages.count("\n") == 1
        assert all(part in messages for part in parts), messages
