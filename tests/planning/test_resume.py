"""The script's arguments from the second attempt on, and where its checkpoints are."""

import shlex

import pytest

from saferun.model import Checkpoint
from saferun.planning import resume
from saferun.settings import ResumePolicy

AT_500 = Checkpoint("out/checkpoint-500", 500, 0.0)


def resumed(argv: str, *args: str, checkpoint: Checkpoint = AT_500, **environ: str) -> str:
    policy = ResumePolicy("", args)
    return shlex.join(resume.arguments(shlex.split(argv), policy, checkpoint, environ))


def pattern(text: str, argv: str = "", **environ: str) -> str | None:
    return resume.pattern(ResumePolicy(text, ()), shlex.split(argv), environ)


@pytest.mark.parametrize(
    ("argv", "args", "made"),
    [
        ("--lr 1", ["--r={checkpoint}"], "--lr 1 --r=out/checkpoint-500"),
        ("--from_step -1 --x", ["--from-step={step}"], "--from_step=500 --x"),
        ("--from-step -1 --x", ["--from-step", "{step}"], "--from-step 500 --x"),
        ("--r=a --x --r b", ["--r={checkpoint}"], "--r=out/checkpoint-500 --x"),
        ("--resume --x", ["--resume={step}"], "--resume=500 --x"),
        ("config.py --init_from=gpt2", ["--init_from=resume"], "config.py --init_from=resume"),
        ("+ckpt=null a.lr=1", ["ckpt={checkpoint}"], "+ckpt=out/checkpoint-500 a.lr=1"),
        ("~ckpt=x a=1", ["ckpt={step}"], "ckpt=500 a=1"),
        ("--ckpt x a=1", ["ckpt={step}"], "--ckpt=500 a=1"),
        ("ckpt=x --a=1", ["--ckpt", "{step}"], "ckpt=500 --a=1"),
        (
            "c.yaml o_dir=x",
            ["--load={--o-dir}", "--tag", "{step}"],
            "c.yaml o_dir=x load=x tag=500",
        ),
        ("c.yaml o_dir=x", ["--r={step}"], "c.yaml o_dir=x --r=500"),
        ("--o=a o=b", ["--load={--o}"], "--o=a o=b --load=b"),
        ("--a 1 -- --r b", ["--r={step}"], "--a 1 --r=500 -- --r b"),
        ("--o=dir", ["--load={--o}", "--tag={VERSION=v1}"], "--o=dir --load=dir --tag=v1"),
        ("--x", ['{"json": 1}'], """--x '{"json": 1}'"""),
    ],
)
def test_an_option_that_the_script_has_is_replaced_and_another_is_appended(argv, args, made):
    assert resumed(argv, *args) == made


def test_a_checkpoint_without_a_number_gives_no_step():
    nameless = Checkpoint("out/ckpt.pt", -1, 0.0)
    assert resumed("", "--r={checkpoint}", checkpoint=nameless) == "--r=out/ckpt.pt"
    with pytest.raises(resume.UnknownError, match="step"):
        resumed("", "--r={step}", checkpoint=nameless)


@pytest.mark.parametrize(
    ("text", "argv", "found"),
    [
        ("{--out_dir=out}/ckpt.pt", "", "out/ckpt.pt"),
        ("{--out_dir=out}/ckpt.pt", "--out-dir a --out_dir=b", "b/ckpt.pt"),
        ("{--o}/*", "--o 'a[1]*'", "a[[]1][*]/*"),
        ("{--o_dir}/*", "c.yaml o_dir=x lr=1", "x/*"),
        ("{--a.o_dir}/*", "a.o_dir=x", "x/*"),
        ("{--o}/*", "--o '{HOME}'", "{HOME}/*"),
        ("{BASE=~/.cache}/{--tag=d{--depth=20}}/m_*", "--depth=12", "/base/d12/m_*"),
        ("{BASE=~/.cache}/{--tag=d{--depth=20}}/m_*", "--depth=12 --tag t", "/base/t/m_*"),
        ("", "", None),
    ],
)
def test_a_pattern_has_the_values_of_arguments_and_variables(text, argv, found):
    assert pattern(text, argv, BASE="/base") == found


def test_a_placeholder_without_a_value_is_named():
    with pytest.raises(resume.UnknownError, match="--output_dir"):
        pattern("{--output_dir}/checkpoint-*", "--lr 1")
