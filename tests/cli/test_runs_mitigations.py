"""`saferun runs mitigations`: the history is listed and forgotten."""

import json
import pathlib

import pytest
from user_machine import MITIGABLE, NOW, OK

from saferun.cli.runs import runs_view
from saferun.errors import SaferunError, UsageError
from saferun.journal import mitigation_history
from saferun.journal.mitigation_history import Entry, Key


def test_mitigations_are_listed_with_what_they_hold_for_and_forgotten(machine):
    machine.launch(MITIGABLE, OK, command_line=("train.py", "--lr", "1"))
    reported = machine.ask("mitigations", "list")
    script = str(machine.cwd / "train.py")
    for part in (script, "nccl-shm-off, for nccl-shm-failed", "no GPU", "arguments: --lr 1"):
        assert part in reported
    (one,) = json.loads(machine.ask("mitigations", "list", "--json"))["mitigations"]
    assert (one["script"], one["mitigation"], one["kind"]) == (
        script,
        "nccl-shm-off",
        "nccl-shm-failed",
    )
    assert one["expires_at"] == one["at"] + mitigation_history.RETRY_WITHOUT_S
    assert machine.ask("mitigations", "clear", "train.py").endswith("1 mitigation forgotten\n")
    assert machine.ask("mitigations", "list") == ""
    assert machine.launch(OK)
    assert "no mitigation in the history is for `train.py`" in machine.ask(
        "mitigations", "clear", "train.py", status=2
    )


H200 = Key("/w/train.py", "NVIDIA H200", "2.13.0", "570.86")
KNOWN = (
    Entry(H200, "autotune-off", "inductor-autotune-error", None, NOW),
    Entry(H200._replace(script="-m pkg.train"), "compile-off", "dynamo-error", ("--a",), NOW),
)


def test_the_mitigations_of_a_script_or_all_are_forgotten(home):
    environ = {"HOME": str(home)}
    for script, left in (
        *(("/w/train.py", [1]), ("train.py", [1])),
        *(("pkg.train", [0]), ("-m pkg.train", [0]), (None, [])),
    ):
        mitigation_history.change(environ, lambda _: KNOWN)
        mitigation_history.clear(environ, script, "/w")
        assert mitigation_history.load(environ) == tuple(KNOWN[n] for n in left)


def test_what_cannot_be_forgotten_is_said(home):
    environ = {"HOME": str(home)}
    mitigation_history.change(environ, lambda _: KNOWN)
    with pytest.raises(UsageError, match=r"`trian.py`; did you mean `/w/train.py`"):
        mitigation_history.clear(environ, "trian.py", "/w")
    assert mitigation_history.load(environ) == KNOWN
    pathlib.Path(mitigation_history.path(environ)).parent.chmod(0o777)  # not ours alone
    with pytest.raises(SaferunError, match="cannot be forgotten"):
        mitigation_history.clear(environ, None, "/w")


def test_until_when_a_mitigation_holds_is_said():
    for arguments, later_s, part in (
        (None, 0.0, "holds until the GPU, torch or the driver changes"),
        (("--a",), 0.0, "holds until "),
        (("--a",), mitigation_history.RETRY_WITHOUT_S, "held until "),
    ):
        reported = runs_view.mitigations([KNOWN[0]._replace(arguments=arguments)], NOW + later_s)
        assert part in reported
        assert "on NVIDIA H200, torch 2.13.0, driver 570.86" in reported
    assert "learned ?" in runs_view.mitigations([KNOWN[0]._replace(at=float("inf"))], NOW)
