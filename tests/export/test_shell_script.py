"""Shell text: any value survives it, and nothing in it is run that is not meant."""

import os
import pathlib
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from repo import ROOT
from scripts import NASTY
from shell_text import DUMP, bash, rendered_script, settings_in_bash

from saferun.cli import gen_shell
from saferun.export import generate, settings_codec, shell_script
from saferun.export.settings_codec import ScriptSettings
from saferun.profile.merge import Given
from saferun.profile.schema import Doc, Leaf

# Any text that a variable or a word can hold; bytes that are no UTF-8 come as surrogates.
TEXT = st.one_of(
    st.text(st.characters(min_codepoint=1, exclude_categories=("Cs",))),
    st.binary().map(lambda b: b.replace(b"\0", b"").decode("utf-8", "surrogateescape")),
    st.sampled_from(["", NASTY, "a\n", "$'", "''", "!!", "~", "-n", "\x1b[0m", "\udcff0"]),
    st.text("$`\"'\\\n\t {}[]*?!#&;|<>()~=%\x01\x7fé0aex"),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=40))
def test_any_value_is_the_same_in_a_real_bash(values):
    lines = [shell_script.quote(value) for value in values]
    assert all("\n" not in line for line in lines)
    "\n".join(lines).encode()  # it can be written as UTF-8
    assert bash(f"got=({' '.join(lines)})\n{DUMP}") == values
    assert shell_script.unquoted(" ".join(lines)) == values


@pytest.mark.parametrize("line", ["a $(b)", 'a "$b"', "a 'b", "a `b`", "$b", r"$'\y'", "$'é'"])
def test_a_line_that_is_not_ours_reads_as_none(line):
    assert shell_script.unquoted(line) is None


@settings(max_examples=100, deadline=None)
@given(TEXT)
@example("x " * 60 + "--- The job ---")
def test_a_comment_stays_one_and_is_no_heading_whatever_it_holds(text):
    made = shell_script.comment(text)
    made.encode()
    assert all(line.startswith("# ") and line[:5] != "# ---" for line in made.splitlines())
    assert made == "" or made.endswith("\n")


def leaves(values: dict[str, str], when=()) -> dict[str, Leaf]:
    why = "because\n$(touch x) `y`\nrm -rf ~"
    return {f"env.{name}": Leaf(value, why, why, when) for name, value in values.items()}


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,8}", fullmatch=True), TEXT, max_size=6),
    TEXT.filter(lambda text: "\n" not in text),
)
def test_settings_come_back_from_bash_as_they_went_in(values, path):
    values = {name: value for name, value in values.items() if not name.startswith("SAFERUN_")}
    first = Doc(path or "p", "p", "", (), (), leaves(values, (("torch", ">=2.8, <2.10"),)))
    last = Doc("q.yaml", "q", "", (), ("H100",), {"retry.resume_args": Leaf((NASTY, "-r"))})
    sets = (Given("env.LAST", Leaf(NASTY), "--set"),)
    script_settings = ScriptSettings("q", "--profile", ("H100",), (first, last), sets)
    argv = settings_in_bash(rendered_script(script_settings))
    read = settings_codec.read(argv, "run.sh")
    assert (read.profile, read.chosen, read.made_for) == ("q", "--profile", ("H100",))
    reported = {key: leaf.value for doc in read.chain for key, leaf in doc.leaves.items()}
    set_ = {f"env.{n}": v for n, v in values.items()}
    assert reported == {**set_, "retry.resume_args": (NASTY, "-r")}
    whens = {
        leaf.when for doc in read.chain for key, leaf in doc.leaves.items() if key[:4] == "env."
    }
    assert whens <= {(("torch", ">=2.8,<2.10"),)}
    assert [(g.key, g.leaf.value, g.origin) for g in read.sets] == [("env.LAST", NASTY, "--set")]


def test_what_a_later_profile_replaces_is_not_shown_twice():
    first = Doc("a.yaml", "a", "", (), (), leaves({"X": "1", "NCCL_DEBUG_SUBSYS": "INIT"}))
    last = Doc("b.yaml", "b", "", (), (), leaves({"X": "2", "NCCL_DEBUG_SUBSYS": "NET"}))
    text = rendered_script(ScriptSettings("b", "--profile", (), (first, last)))
    assert "export_default X 1" not in text
    assert "export_default X 2" in text
    assert "export_default NCCL_DEBUG_SUBSYS INIT" in text  # a list: the two are merged


# To renew the record after a change that is meant, in the checkout's root:
#   saferun gen-shell --profile h100-nanochat --set "env.NOTE=it's \$HOME" -- -m scripts.base |
#     grep -v '^#: ' >tests/records/run-h100-nanochat.sh
# and read its difference (git diff) as a user would.
RECORD = ROOT / "tests" / "records" / "run-h100-nanochat.sh"
RECORDED = ["--profile", "h100-nanochat", "--set", "env.NOTE=it's $HOME"]
RECORDED += ["--", "-m", "scripts.base"]


def test_a_whole_script_is_as_recorded(tmp_path):
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    text = generate.make(gen_shell.read(RECORDED, environ), environ, str(tmp_path)).text
    assert shell_script.without_bundle(text) == RECORD.read_text(encoding="utf-8")


def test_the_linters_have_nothing_to_say(tmp_path):
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    files = []
    for profile in ("debug", "h100-llava", "rtx4090", "cpu"):
        argv = ["--profile", profile, "--set", "env.A=$B `c`", "--", "train.py", NASTY]
        text = generate.make(gen_shell.read(argv, environ), environ, str(tmp_path)).text
        files.append(tmp_path / f"{profile}.sh")
        files[-1].write_text(
            shell_script.without_bundle(text) + "#: " + shell_script.packed(text)[:96] + "\n",
            encoding="utf-8",
        )
    tools = pathlib.Path(sys.executable).parent
    for tool in (["shellcheck"], ["shfmt", "-i", "2", "-ci", "-d"]):
        if not (tools / tool[0]).exists():
            pytest.skip(f"no {tool[0]} beside this Python")
        done = subprocess.run([tools / tool[0], *tool[1:], *files], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
