"""`saferun runs clean` removes what is old and over, and nothing else."""

import os
import shutil
import time

import pytest
from helpers import until
from rights import STRANGER, needs
from user_machine import NOW, OK, a_run, event, finished, journal, names

from saferun.errors import UnavailableError
from saferun.journal import cleanup
from saferun.journal import reader as runs


def aged(*days: float, outcome: str = "ok") -> list[runs.Run]:
    return [a_run(id=f"{d}", outcome=outcome, last_at=NOW - d * runs.DAY_S) for d in days]


def test_what_is_old_and_over_and_not_among_the_newest_goes():
    for days, keep, gone in ((14.0, 0, ["14", "20"]), (14.0, 3, ["20"]), (0.0, 4, [])):
        found = cleanup.removable(aged(0, 1, 14, 20), NOW, older_than_days=days, keep=keep)
        assert names(found) == gone
    for outcome in ("running", "unknown"):
        some = aged(1000, outcome=outcome)
        assert cleanup.removable(some, NOW, older_than_days=0, keep=0) == ()


def test_by_default_the_newest_twenty_and_two_weeks_stay(machine):
    now = time.time()
    for number in range(25):
        finished(machine.runs, f"old-{number:02}", now - (30 + number) * runs.DAY_S)
    for number in range(3):
        finished(machine.runs, f"young-{number}", now - number * runs.DAY_S)
    messages = machine.ask("clean").splitlines()
    left = sorted(place.name for place in machine.runs.iterdir())
    assert left == [*(f"old-{n:02}" for n in range(17)), *(f"young-{n}" for n in range(3))]
    assert messages[0].startswith("removed old-17 (")
    assert messages[-1].startswith("removed 8 runs, ")
    assert messages[-1].endswith("; 20 kept")


def test_a_run_that_took_long_is_as_old_as_its_end(tmp_path):
    began, ended = NOW - 20 * runs.DAY_S, NOW - runs.DAY_S
    journal(tmp_path, "r", event("attempt", began, attempt=1), event("end", ended, status=0))
    assert cleanup.clean(str(tmp_path), NOW, keep=0).removed == ()


def test_a_run_that_lives_is_never_removed(machine):
    done = machine.launch(OK)
    with machine.running({"wait": str(machine.folder / "gate")}, waits_for='"started"'):
        until(lambda: len(list(machine.runs.glob("*/plan.json"))) == 2, "two runs", 300)
        messages = machine.ask("clean", "--older-than", "0", "--keep", "0")
        (left,) = machine.runs.iterdir()
        assert (left / "plan.json").exists()
    assert f"removed {done.name}" in messages
    assert messages.endswith("1 kept, 1 of them not over\n")


def test_a_dry_run_removes_nothing_and_says_the_same(machine):
    finished(machine.runs, "r", NOW - 90 * runs.DAY_S)
    messages = machine.ask("clean", "--keep", "0", "--dry-run")
    assert (machine.runs / "r" / "plan.json").exists()
    assert messages.replace("would remove", "removed") == machine.ask("clean", "--keep", "0")
    assert not (machine.runs / "r").exists()


def test_how_much_space_is_freed_is_measured_on_the_disk(tmp_path):
    place = finished(tmp_path, "r", NOW - 90 * runs.DAY_S)
    (place / "cache").mkdir()
    (place / "cache" / "big").write_bytes(os.urandom(3_000_000))
    ((_, taken),) = cleanup.clean(str(tmp_path), NOW, keep=0).removed
    assert 3_000_000 <= taken < 3_200_000


def test_nothing_outside_of_a_run_is_removed(tmp_path):
    precious = tmp_path / "precious"
    (precious / "deep").mkdir(parents=True)
    (precious / "deep" / "model.pt").write_text("weights", encoding="utf-8")
    place = finished(tmp_path / "runs", "r", NOW - 90 * runs.DAY_S)
    (place / "receipts").mkdir()
    (place / "link").symlink_to(precious)
    (place / "receipts" / "link").symlink_to(precious)
    (tmp_path / "runs" / "linked").symlink_to(place)
    (tmp_path / "runs" / "notes").mkdir()
    done = cleanup.clean(str(tmp_path / "runs"), NOW, keep=0)
    assert ([run.id for run, _ in done.removed], done.failed) == (["r"], ())
    assert (precious / "deep" / "model.pt").read_text(encoding="utf-8") == "weights"
    assert sorted(os.listdir(tmp_path / "runs")) == ["linked", "notes"]


@pytest.mark.parametrize("put", ["link", "stranger"])
def test_what_was_put_in_a_runs_place_meanwhile_stays(tmp_path, put):
    finished(tmp_path, "r", NOW)
    run = runs.read(str(tmp_path), "r", NOW)
    os.rename(tmp_path / "r", tmp_path / "moved")
    if put == "link":
        (tmp_path / "r").symlink_to(tmp_path / "moved")
    else:
        (tmp_path / "r").mkdir()
        (tmp_path / "r" / "model.pt").touch()
    with pytest.raises(OSError, match="r"):
        cleanup.remove(run)
    assert (tmp_path / "moved" / "plan.json").exists()
    assert (put == "link") or (tmp_path / "r" / "model.pt").exists()


@needs("become others")
def test_another_users_run_is_left_alone(tmp_path):
    place = finished(tmp_path, "r", NOW - 90 * runs.DAY_S)
    os.chown(place, STRANGER, -1)
    done = cleanup.clean(str(tmp_path), NOW, keep=0, older_than_days=0)
    assert (done.removed, done.others) == ((), 1)
    with pytest.raises(PermissionError):
        cleanup.remove(runs.read(str(tmp_path), "r", NOW))
    assert (place / "plan.json").exists()


def test_what_cannot_be_removed_is_said_and_stays_listed(tmp_path, monkeypatch):
    for name in ("bad", "good"):
        (finished(tmp_path, name, NOW - 90 * runs.DAY_S) / "receipts").mkdir()
    real = shutil.rmtree

    def refusing(path):
        if os.path.realpath(path).endswith("bad/receipts"):
            raise PermissionError(13, "Permission denied")
        real(path)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    done = cleanup.clean(str(tmp_path), NOW, keep=0)
    assert [run.id for run, _ in done.removed] == ["good"]
    assert names(runs.find(str(tmp_path), NOW)[0]) == ["bad"]
    with pytest.raises(UnavailableError, match="run bad could not be removed: Permission denied"):
        cleanup.check_cleaned(done)


def test_a_wrong_number_removes_nothing(machine):
    finished(machine.runs, "r", NOW - 900 * runs.DAY_S)
    for argv in (["--keep", "-1"], ["--older-than", "-1"], ["--keep", "x"]):
        machine.ask("clean", *argv, status=2)
    assert (machine.runs / "r").exists()
