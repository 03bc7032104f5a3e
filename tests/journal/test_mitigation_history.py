"""Mitigations that helped are found again, for the same script on the same machine only."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from saferun.journal import mitigation_history
from saferun.journal.mitigation_history import RETRY_WITHOUT_S, Entry, Key

KEY = Key("/w/train.py", "NVIDIA H200", "2.13.0", "570.86")
NOW = 1_800_000_000.0


def entry(
    mitigation: str = "autotune-off", *, arguments=None, at: float = NOW, key: Key = KEY
) -> Entry:
    return Entry(key, mitigation, "inductor-autotune-error", arguments, at)


@pytest.fixture
def environ(home):
    return {"HOME": str(home)}


def test_what_was_saved_is_there_again(environ):
    kept = (entry(), entry("compile-off", arguments=("--lr", "1e-3"), at=NOW + 1))
    assert mitigation_history.save(environ, kept)
    assert mitigation_history.load(environ) == kept
    path = mitigation_history.path(environ)
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("field", Key._fields)
def test_another_script_gpu_torch_or_driver_is_another_matter(field):
    other = KEY._replace(**{field: "other"})
    assert mitigation_history.recall([entry()], KEY, (), NOW) == (entry(),)
    assert mitigation_history.recall([entry()], other, (), NOW) == ()


def test_a_mitigation_that_costs_nothing_holds_for_any_arguments_and_for_good():
    assert mitigation_history.recall([entry()], KEY, ("--new",), NOW + 100 * RETRY_WITHOUT_S)


@pytest.mark.parametrize(
    ("arguments", "later_s", "found"),
    [
        (("--a",), 0.0, True),
        (("--a",), RETRY_WITHOUT_S - 1, True),
        (("--a",), RETRY_WITHOUT_S, False),
        (("--a",), -10.0, False),
        (("--b",), 0.0, False),
    ],
    ids=["same", "within the week", "after it", "learned in the future", "other arguments"],
)
def test_a_mitigation_that_costs_holds_for_its_arguments_and_a_week(arguments, later_s, found):
    costs = entry(arguments=("--a",))
    assert bool(mitigation_history.recall([costs], KEY, arguments, NOW + later_s)) is found


def test_mitigations_come_back_in_the_order_in_which_they_were_learned():
    first, second = entry("a", at=NOW), entry("b", at=NOW + 5)
    assert mitigation_history.recall([second, first], KEY, (), NOW + 9) == (first, second)


def test_a_mitigation_that_is_learned_anew_has_its_new_time():
    old, new = entry(arguments=("--a",)), entry(arguments=("--a",), at=NOW + 10)
    assert mitigation_history.learn([old, entry("b")], [new]) == (new, entry("b"))


def test_a_mitigation_can_be_forgotten():
    assert mitigation_history.forget([entry(), entry("b")], [entry()]) == (entry("b"),)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"[]",
        b'{"schema": 2, "mitigations": []}',
        b'{"schema": 1, "mitigations": [{}]}',
        b"\xff",
    ],
    ids=["empty", "no JSON", "a list", "another schema", "half an entry", "no text"],
)
def test_a_broken_file_is_an_empty_memory(environ, content):
    path = Path(mitigation_history.path(environ))
    path.parent.mkdir(parents=True, mode=0o700)
    path.write_bytes(content)
    assert mitigation_history.load(environ) == ()


def test_a_planted_link_is_not_read(environ, tmp_path):
    target = tmp_path / "theirs.json"
    target.write_text(json.dumps({"schema": 1, "mitigations": []}))
    path = mitigation_history.path(environ)
    os.makedirs(os.path.dirname(path), mode=0o700)
    os.symlink(target, path)
    assert mitigation_history.load(environ) == ()


def test_the_file_does_not_grow_for_ever(environ):
    many = [entry(f"c{n}", at=NOW + n) for n in range(mitigation_history.ENTRIES + 20)]
    mitigation_history.save(environ, many)
    assert mitigation_history.load(environ) == tuple(many[20:])
