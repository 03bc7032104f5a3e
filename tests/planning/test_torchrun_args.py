"""torchrun's command line: what saferun passes on means to torchrun what the user meant."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cases import check_cases
from torchrun_lines import AMBIGUOUS_ARGS, READINGS, REFUSALS, parsers_options, same_reading

from saferun.knowledge.torchrun_options import OPTIONS, of_torch
from saferun.planning.torchrun.torchrun_args import LAUNCH_ONLY, OWN, advice, parse


def test_the_table_is_that_of_the_installed_torch_field_by_field():
    known = of_torch(version("torch"))
    if known is None:
        pytest.skip("this torch is none of the releases in our table")
    assert parsers_options() == known


def test_no_option_of_ours_is_an_option_or_an_abbreviation_of_torchruns():
    strings = [string for option in OPTIONS for string in option.strings]
    assert not [own for own in OWN for string in strings if string.startswith(own)]


@pytest.fixture(scope="module")
def public_lines(corpus: Path) -> dict[str, tuple[Any]]:
    text = (corpus / "torchrun_commands.jsonl").read_text(encoding="utf-8")
    records = map(json.loads, text.splitlines())
    return {record["id"]: (record,) for record in records}


def test_a_public_command_line_means_to_torchrun_what_it_meant(public_lines, reals):
    def check(record):
        line = parse(record["argv"]).line
        if record.get("parse_error", "").startswith("ambiguous option: --log"):
            safe = list(record["argv"])
            safe.insert(safe.index("main"), "--")
            for real in reals.values():
                assert real(line.args) == real(safe)
            assert same_reading(line, reals["none"](safe))
            return
        assert list(line.args) == record["argv"]
        assert line.script == record["script"]
        assert list(line.script_args) == record["script_args"]
        assert line.refusal == record.get("parse_error")

    check_cases(public_lines, check)


def test_our_options_in_a_public_command_line_change_nothing_for_torchrun(public_lines):
    ours = ["--profile", "h100", "--set=env.X=a b", "--dry-run"]

    def check(record):
        parsed = parse(ours + record["argv"])
        assert parsed.line == parse(record["argv"]).line
        assert [name for name, _ in parsed.own] == ["--profile", "--set", "--dry-run"]

    check_cases(public_lines, check)


def test_a_line_is_passed_on_unchanged_and_read_as_torchrun_reads_it(reals):
    def check(argv, script, script_args):
        parsed = parse(argv)
        assert parsed.line.args == tuple(argv)
        assert (parsed.line.script, list(parsed.line.script_args)) == (script, script_args)
        for real in reals.values():
            assert same_reading(parsed.line, real(argv))
        assert parsed.own == ()

    check_cases(READINGS, check)


def test_what_torchrun_refuses_is_refused_with_its_own_message(real):
    def check(argv, message):
        line = parse(argv).line
        assert line.refusal == message
        assert (line.script, line.script_args) == (None, ())
        assert line.args == tuple(argv)
        assert same_reading(line, real(argv))

    check_cases(REFUSALS, check)


def test_an_ambiguous_argument_of_the_script_reaches_the_script(real):
    def check(argv, passed):
        line = parse(argv).line
        assert list(line.args) == passed
        assert same_reading(line, real(passed))
        assert not isinstance(real(passed), str)

    check_cases(AMBIGUOUS_ARGS, check)


def test_use_env_gets_clear_advice():
    for word in ("--use_env", "--use-env"):
        line = parse([word, "t.py"]).line
        assert advice(line) == LAUNCH_ONLY[word]
        assert "leave it out" in LAUNCH_ONLY[word]
        assert parse([word, "t.py"]).unsure == ()
    assert advice(parse(["t.py", "--use_env"]).line) == ""
    assert advice(parse(["--other", "t.py"]).line) == ""


@pytest.mark.parametrize(
    ("word", "meant"),
    [("--profil=h100", "--profile"), ("--run_dir", "--run-dir"), ("--retry", "--retries")],
)
def test_a_misspelt_option_of_saferuns_has_an_advice(word, meant):
    assert advice(parse([word, "t.py"]).line) == f"did you mean saferun's `{meant}`?"
    assert advice(parse(["t.py", word]).line) == ""
