"""saferun's own options among torchrun's, and what another torch may read differently."""

import itertools

import pytest
from cases import check_cases

from saferun.errors import UsageError
from saferun.knowledge.torchrun_options import OPTIONS
from saferun.planning.torchrun.torchrun_args import OWN, parse


def test_our_options_are_taken_out_in_order_and_repeat():
    before = ["--profile", "h100", "-m", "--set", "a=1", "--set=b=2=3", "--retries=2"]
    after = ["--nnodes", "2", "--run-dir", "/r", "--dry-run", "mod", "--set", "c=3"]
    parsed = parse([*before, *after])
    assert parsed.own == (
        ("--profile", "h100"),
        ("--set", "a=1"),
        ("--set", "b=2=3"),
        ("--retries", "2"),
        ("--run-dir", "/r"),
        ("--dry-run", ""),
    )
    assert parsed.line.args == ("-m", "--nnodes", "2", "mod", "--set", "c=3")
    assert parsed.unsure == ()


WITH_A_VALUE = [name for name, value in OWN.items() if value]
BEHIND_IT = {
    "end": [],
    "torchrun's option": ["--nnodes", "2", "t.py"],
    "--": ["--", "t.py"],
    "our option": ["--dry-run", "t.py"],
    "empty": ["", "t.py"],
}


@pytest.mark.parametrize(
    ("name", "tail"),
    list(zip(itertools.cycle(WITH_A_VALUE), BEHIND_IT.values(), strict=False)),
    ids=BEHIND_IT,
)
def test_our_option_without_its_value_is_a_usage_error(name, tail):
    with pytest.raises(UsageError, match=f"{name} needs a value") as error:
        parse([name, *tail])
    assert error.value.code == 2
    with pytest.raises(UsageError, match="--profile needs a value"):
        parse(["--profile=", "t.py"])
    with pytest.raises(UsageError, match="--dry-run takes no value"):
        parse(["--dry-run=yes", "t.py"])
    assert f"{name}=" in error.value.fix


def test_a_command_may_have_other_options_of_its_own():
    own = {**OWN, "--json": None, "-o": "FILE"}
    parsed = parse(["--json", "-o", "x", "-t3", "t.py", "--json"], own=own)
    assert parsed.own == (("--json", ""), ("-o", "x"))
    assert parsed.line.args == ("-t3", "t.py", "--json")


@pytest.mark.parametrize("ours", [["--dry-run"], ["--profile", "x"], ["--set=a=b"]])
def test_our_option_between_an_option_and_its_value_is_torchruns_error(ours, real):
    argv = ["--standalone", "--nnodes", *ours, "2", "t.py"]
    line = parse(argv).line
    assert line.args == tuple(argv)
    assert line.refusal == real(argv) == "argument --nnodes: expected one argument"


UNSURE = {
    "exact argv": (["--nnodes", "2", "-mt3", "--tee=3", "mod", "--x"], ()),
    "unknown": (["--new-thing", "t.py"], ("--new-thing",)),
    "unknown with value": (["--new-thing=3", "-x", "t.py"], ("--new-thing=3", "-x")),
    "unique abbreviation": (["--nnode=2", "--standa", "t.py"], ("--nnode=2", "--standa")),
    "ambiguous abbreviation": (["--log", "x", "t.py"], ("--log",)),
    "ours": (["--profile", "x", "t.py"], ()),
    "script arguments": (["t.py", "--nn", "--new"], ()),
}


def test_arguments_that_the_table_does_not_settle_are_named():
    def check(argv, unsure):
        assert parse(argv).unsure == unsure

    check_cases(UNSURE, check)


def test_another_torchs_table_settles_them():
    newer = (*OPTIONS, OPTIONS[1]._replace(dest="new_thing", strings=("--new-thing",)))
    argv = ["--new-thing", "3", "--profile", "x", "t.py"]
    assert parse(argv).line.refusal == "unrecognized arguments: --new-thing"
    parsed = parse(argv, options=newer)
    assert (parsed.line.script, parsed.line.given, parsed.unsure) == (
        "t.py",
        {"new_thing": "3"},
        (),
    )
    assert parsed.own == (("--profile", "x"),)
