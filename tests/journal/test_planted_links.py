"""No journal is written through a link that somebody planted."""

import os
import pathlib

import pytest
from journals import PLAN, noted, use
from rights import STRANGER, needs
from sandbox import text_of, write
from users import acting_as, open_place

from saferun.inject import receipts


def test_a_link_under_the_runs_name_is_not_followed(begin, base, tmp_path, messages, monkeypatch):
    trap = tmp_path / "trap"
    trap.mkdir()
    base.mkdir(parents=True)
    (base / "r").symlink_to(trap)
    journal = begin()
    use(journal)
    assert (journal.path, messages) == (str(base / "r-2"), [])
    real = os.mkdir

    def swapped(path, *args, **kwargs):
        real(path, *args, **kwargs)
        if path == "s":
            (base / "s").rmdir()
            (base / "s").symlink_to(trap)

    monkeypatch.setattr(os, "mkdir", swapped)  # in place of the directory just made
    use(begin(run="s"))
    assert (list(trap.iterdir()), len(messages)) == ([], 1)


def test_a_link_under_a_files_name_is_replaced_not_followed(begin, base, tmp_path, messages):
    target = tmp_path / "target"
    write(target, "mine")
    journal = begin()
    draft = f"plan.json.{os.getpid()}.tmp"
    planted = [base / "r" / name for name in ("plan.json", "attempt-1.stdout", draft)]
    for path in planted:
        path.symlink_to(target)
    use(journal)
    assert text_of(target) == "mine"
    assert not any(path.is_symlink() for path in planted)
    assert (base / "r" / "plan.json").is_file()
    assert messages == []


@pytest.mark.parametrize("plant", ["symlink_to", "hardlink_to", "fifo"])
def test_a_link_under_the_name_of_the_events_is_refused(begin, base, tmp_path, messages, plant):
    target = tmp_path / "target"
    write(target, "mine")
    journal = begin()
    file = base / "r" / "events.jsonl"
    file.unlink()
    os.mkfifo(file) if plant == "fifo" else getattr(file, plant)(target)
    journal.event(noted("start"))
    journal.event(noted("end"))
    assert text_of(target) == "mine"
    assert len(messages) == 1
    assert "does not answer" not in messages[0]  # refused, and not waited for


def test_a_directory_swapped_underneath_gets_nothing(begin, base, tmp_path):
    journal = begin()
    (base / "r").rename(base / "moved")
    (base / "r").mkdir()
    (base / "r" / "receipts").mkdir()
    journal.plan(PLAN)
    journal.event(noted("start"))
    journal.tails(1, b"out", b"err")
    assert [p.name for p in (base / "r").rglob("*")] == ["receipts"]
    assert (base / "moved" / "plan.json").is_file()
    assert journal.receipts() is None  # ranks go by the path
    (base / "r" / "receipts").rmdir()
    (base / "r" / "receipts").symlink_to(base / "moved" / "receipts")
    assert journal.receipts() is None


@needs("become others")
@pytest.mark.parametrize("plant", ["link", "linked parts"])
def test_what_ranks_write_in_another_users_directory_goes_to_the_run_alone(begin, tmp_path, plant):
    ours = tmp_path / "ours"
    with open_place() as place:
        os.chown(place, STRANGER, STRANGER)
        journal = begin(pathlib.Path(place))
        places = {"receipts": journal.receipts(), "state": journal.state()}
        places["flight"] = journal.flight()
        for name in places:
            (ours / name).mkdir(parents=True)
        with acting_as(STRANGER):
            os.rename(f"{place}/r", f"{place}/moved")
            if plant == "link":
                os.symlink(ours, f"{place}/r")
            else:
                os.mkdir(f"{place}/r")
                for name in places:
                    os.symlink(ours / name, f"{place}/r/{name}")
        for name, path in places.items():
            receipts.append(path, "a1.jsonl", ["{}"])
            assert text_of(pathlib.Path(place, "moved", name, "a1.jsonl")) == "{}\n"
        assert journal.took_receipts()
        assert not [path for path in ours.rglob("*") if path.is_file()]


@needs("become others")
def test_a_run_that_never_began_removes_nothing_by_a_planted_link(begin, tmp_path):
    write(tmp_path / "mine", "")
    with open_place() as place:
        os.chown(place, STRANGER, STRANGER)
        journal = begin(pathlib.Path(place))
        with acting_as(STRANGER):
            os.rename(f"{place}/r", f"{place}/moved")
            os.symlink(tmp_path, f"{place}/r")
        journal.discard()
    assert (tmp_path / "mine").exists()


def test_the_users_own_link_to_a_larger_disk_is_followed(begin, base, tmp_path, messages):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    base.parent.mkdir()
    base.symlink_to(scratch)
    use(begin())
    assert (scratch / "r" / "plan.json").is_file()
    assert messages == []


@needs("become others")
def test_somebody_elses_link_in_place_of_the_base_is_refused(begin, base, tmp_path, messages):
    trap = tmp_path / "trap"
    trap.mkdir()
    base.parent.mkdir()
    base.symlink_to(trap)
    os.lchown(base, STRANGER, STRANGER)
    journal = begin()
    use(journal)
    assert (journal.path, list(trap.iterdir()), len(messages)) == (None, [], 1)
