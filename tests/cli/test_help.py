"""`saferun help`: every word that saferun prints or takes is explained, from the data alone."""

import re
from pathlib import Path

import pytest
from command import call
from repo import ROOT

from saferun import errors
from saferun.cli import reference, usage
from saferun.diagnosis.deciding import retry_policy
from saferun.journal import event_types
from saferun.knowledge.torchrun_options import OPTIONS
from saferun.planning.torchrun import torchrun_args
from saferun.settings import KEYS


def ask(home: Path, *argv: str, status: int = 0) -> str:
    """Return what `saferun help ARGV` prints."""
    done = call("help", *argv, environ={"HOME": str(home), "PATH": "/usr/bin:/bin"}, cwd=home)
    assert done.returncode == status, done.stderr
    return done.stderr if status else done.stdout


def test_every_listed_word_has_an_entry(home):
    known = reference.Reference({"HOME": str(home)})
    for what, words in known.words().items():
        for word in words:
            found = known.entries(word)
            assert found, (what, word)
            for entry in found:
                assert entry.paragraphs, (what, word)


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (
            "cuda-oom-fragmentation",
            [
                "cuda-oom-fragmentation: kind of failure (memory)",
                "saferun tries again with a setting changed (expandable-segments, then split-",
            ],
        ),
        ("expandable-segments", ["Sets PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."]),
        ("nccl_p2p_disable", ["NCCL_P2P_DISABLE: variable", "Read by nccl from 2.20.5 on."]),
        ("shards", ["shards: hook", "hooks.shards: warn, error, off. What happens when"]),
        ("hooks.guards", ["guards: hook", "hooks.guards.labels: off, on."]),
        ("retry.rejoin_s", ["retry.rejoin_s: 60.0 s. How long a node waits"]),
        ("retry.resume", ["retry.resume: profile keys", "retry.resume.args: []. The script's"]),
        ("h100", ["h100: profile", "NVIDIA H100", "`saferun profiles show h100`"]),
        ("stop-user", ["stop-user: verdict", "saferun stops: code, data, arguments"]),
        ("plan", ["plan: command", "Show what would run: ", "`saferun plan --help`", "word of"]),
        ("keeper", ["keeper: word", "owns its processes", "kinds of failure: keeper-killed"]),
        ("saferun runs watch", ["runs watch: command", "--interval"]),
        ("runs mitigations clear", ["runs mitigations clear: command"]),
        ("--retries", ["--retries: option", "Attempts after the first; 0 is none."]),
        ("--markdown", ["Of `saferun runs report`: "]),
        ("--sbatch", ["Of `saferun gen-shell`: "]),
        ("--nproc_per_node", ["Of torchrun", "PET_NPROC_PER_NODE"]),
        ("root_rank", ["root rank: word", "failed first"]),
        ("69", ["69: exit status", "program or log does not exist"]),
        ("137", ["SIGKILL ended the process"]),
        ("sigkill", ["SIGKILL: signal 9", "the status 137 for a shell and -9 for"]),
        ("oom", ["cuda-oom-fragmentation", "tf-oom", "host-oom-killed"]),
        ("nccl", ["nccl-version-mismatch", "mitigations: nccl-cumem-off", " more"]),
        ("pythonpath", ["PYTHONPATH: variable", "sitecustomize.py in front"]),
        ("overloaded", ["overloaded is not a name; the text about these has it:"]),
        ("SAFERUN_DISABLE", ["SAFERUN_DISABLE=1 runs torchrun untouched"]),
        ("saferun_retries", ["As the option --retries N: attempts after the first"]),
        ("SAFERUN_VERDICT_FILE", ["SAFERUN_VERDICT_FILE=FILE gets the verdict on a run"]),
        ("TORCHINDUCTOR_DISABLE", ["Has no effect: there is no such variable", "compiling; fix:"]),
        ("FI_PROVIDER", ["libfabric's providers", "Read by libfabric, for NCCL"]),
        ("TRANSFORMERS_CACHE", ["Read by transformers before 5.", "fix: export HF_HOME"]),
        ("NCCL_DEBUG", ["The value TRACE: every call of every rank is written; fix: NCCL_DEBUG="]),
    ],
)
def test_a_word_is_explained(home, word, shown):
    text = ask(home, word)
    assert [line for line in shown if line not in text] == []


def test_the_name_that_is_spelt_so_comes_before_others_that_differ_in_case(home):
    assert ask(home, "NCCL_TIMEOUT").startswith("NCCL_TIMEOUT: variable")
    assert "\nnccl-timeout: kind" in ask(home, "NCCL_TIMEOUT")
    assert ask(home, "nccl-timeout").startswith("nccl-timeout: kind of failure")


def test_every_word_that_saferun_prints_or_takes_is_explained(home):
    known = reference.Reference({"HOME": str(home)})
    configuration = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    words = [*torchrun_args.COMMANDS, *torchrun_args.OWN, *KEYS]
    words += [string for option in OPTIONS for string in option.strings]
    words += [str(code) for name, code in vars(errors).items() if name.startswith("EXIT_")]
    words += event_types.NAMES.values()
    words += ["ok", "failed", "interrupted", "running"]
    words += [retry_policy.AGAIN, retry_policy.STOP, retry_policy.DONE]
    words += re.findall(r"`([a-z_]+)`", configuration.partition("## JSON")[2])
    words += set(re.findall(r"\bSAFERUN_[A-Z_]*[A-Z]\b", source + configuration))
    unknown = {word for word in words if not (known.entries(word) or known.similar(word))}
    assert {word for word in unknown if not known.mentions(word)} == set()


def test_without_a_word_it_is_the_front_page(home):
    assert ask(home) == usage.HELP


def test_an_unknown_word_is_met_with_the_nearest(home):
    for word, near in (("cuda-oom-fragmentatoin", "cuda-oom-fragmentation"), ("journl", "journal")):
        assert f"did you mean `{near}`?" in ask(home, word, status=2)
    assert "did you mean" not in ask(home, "qqqqq", status=2)
    assert "saferun help --list" in ask(home, "x" * 5000, status=2)
    assert "expandable-segments" in ask(home, "--list")
