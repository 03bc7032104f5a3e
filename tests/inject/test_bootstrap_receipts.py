"""What ranks write down about their hooks: which process does, when, and where it cannot."""

import json
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest
from interpreters import NEUTRAL, SITE, both, fake_torch, other_pythons
from repo import source
from sandbox import shell
from users import open_place

from saferun.inject.targets import TARGETS

BY_HAND = """
import importlib.util, sys
found = importlib.util.find_spec("torch")
sys.modules["torch"] = torch = type(sys)("torch")
torch.__spec__ = found
exec(open(found.origin).read(), torch.__dict__)
"""
ACTIVE = """
import os
from _saferun.inject.hook_runner import current
current(os.environ["SAFERUN_INJECT"]).activate()
"""
STATES = {
    "plain": (ACTIVE + "import torch", "applied"),
    "none": (ACTIVE, "not imported"),
    "by hand, before the process is active": (BY_HAND + ACTIVE, "applied"),
    "by hand, and never seen again": (ACTIVE + BY_HAND, "missed"),
    "replaced": (ACTIVE + "import torch; torch.compile = len", "missed"),
    "wrapped": (
        ACTIVE + "import torch; old = torch.compile; torch.compile = lambda *a: old(*a)",
        "applied",
    ),
}


@pytest.mark.parametrize(("script", "state"), STATES.values(), ids=STATES)
def test_a_receipt_tells_what_became_of_each_target(interpreters, script, state):
    fake = fake_torch(interpreters.folder)
    hooks = {"compile": {"enabled": "off"}}
    ran = interpreters.run(script, hooks=hooks, PYTHONPATH=both(SITE, fake), RANK="0")
    first, *later = [line["targets"] for line in ran.by("targets")]
    assert set(first) == set(TARGETS), ran.err
    reported = {name: found for line in (first, *later) for name, found in line.items()}
    assert reported == {**dict.fromkeys(TARGETS, "not imported"), "torch": state}
    assert (ran.code, ran.err) == (0, "")


WRITES = source("inject/write_receipts")


def test_the_receipts_of_hooks_wait_until_the_process_is_active(interpreters):
    fake = fake_torch(interpreters.folder)
    path = both(SITE, fake)
    idle = interpreters.run("import torch", hooks=NEUTRAL, PYTHONPATH=path, RANK="3")
    assert (idle.code, [line["hook"] for line in idle.receipts]) == (0, ["bootstrap"])
    shutil.rmtree(interpreters.receipts)
    ran = interpreters.run(
        WRITES, hooks=NEUTRAL, PYTHONPATH=path, RANK="3", TORCHELASTIC_RESTART_COUNT="2"
    )
    assert [(line["n"], line["rank"]) for line in ran.by("test", "applied")] == [(1, 3)]
    assert (ran.receipts[0]["hook"], ran.receipts[-1]["hook"]) == ("bootstrap", "test")
    (file,) = interpreters.receipts.iterdir()
    assert file.name.startswith("a1-r2-rank3-pid")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(interpreters.receipts.stat().st_mode) == 0o700


def test_receipts_are_appended_and_never_follow_a_link(interpreters):
    fake = fake_torch(interpreters.folder)
    interpreters.receipts.mkdir()
    target = interpreters.folder / "precious"
    target.write_text("mine", encoding="utf-8")
    (interpreters.folder / "script.py").write_text(WRITES + "print('done')", encoding="utf-8")
    link = f"ln -s {shell(target)} {shell(interpreters.receipts)}/a1-r0-rank0-pid$$.jsonl"
    words = shell(sys.executable, interpreters.folder / "script.py")
    ran = interpreters.run(
        python="/bin/sh",
        argv=("-c", f"{link} && exec {words}"),
        hooks=NEUTRAL,
        PYTHONPATH=both(SITE, fake),
        RANK="0",
    )
    assert (ran.code, ran.out.splitlines()[-1:], target.read_text(encoding="utf-8")) == (
        0,
        ["done"],
        "mine",
    )
    assert ran.err == ""


@pytest.mark.parametrize("where", ["/dev/full/x", "/proc/nowhere", "/dev/null/x"])
def test_an_unwritable_receipt_stops_no_job(interpreters, where):
    fake = fake_torch(interpreters.folder)
    interpreters.receipts = Path(where)
    ran = interpreters.run(
        WRITES + "print('done')", hooks=NEUTRAL, PYTHONPATH=both(SITE, fake), RANK="0"
    )
    assert (ran.code, ran.out.splitlines()[-1], ran.err) == (0, "done", "")


def test_a_forked_helper_of_an_active_rank_leaves_no_receipt(interpreters):
    fake = fake_torch(interpreters.folder)
    script = WRITES + (
        "import os\n"
        "if os.fork() == 0:\n    context.receipt('child', 'applied'); os._exit(0)\n"
        "os.wait()\n"
    )
    ran = interpreters.run(script, hooks=NEUTRAL, PYTHONPATH=both(SITE, fake), RANK="0")
    assert ran.by("test")
    assert ran.by("child") == []


# a rank's first line


@pytest.mark.parametrize("python", other_pythons(), ids=lambda p: p.parts[-3])
def test_a_rank_says_at_its_start_that_the_hooks_run(interpreters, python):
    before = time.time()
    script = "import os; print(os.getpid())"
    facts = {"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    agents = {
        "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_ERROR_FILE": "/tmp/t/\u00e9/error.json",
    }
    ran = interpreters.run(script, hooks=NEUTRAL, python=str(python), **facts, **agents)
    line = ran.receipts[0]
    assert before <= line.pop("at") <= time.time()
    assert line == {
        "v": 1,
        "pid": int(ran.out),
        "rank": 5,
        "hook": "bootstrap",
        "outcome": "applied",
        "local_rank": 1,
        "local_world_size": 4,
        "error_file": "/tmp/t/\u00e9/error.json",
    }
    (file,) = interpreters.receipts.iterdir()
    assert file.name == f"a1-r2-rank5-pid{int(ran.out)}.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "extra",
    [{}, {"RANK": "0", "SAFERUN_RANK_PID": "1"}, {"RANK": "0", "SAFERUN_AGENT_PID": "1"}],
    ids=["no rank", "a helper of a rank", "not the agent's child"],
)
def test_a_process_that_is_no_rank_leaves_none(interpreters, extra):
    assert interpreters.run(hooks=NEUTRAL, **extra).receipts == []


ERROR_FILES = ['/a"b/e', "/a\\b/e", "/a\nb/e", os.fsdecode(b"/\xff/e")]  # json writes otherwise


@pytest.mark.parametrize(
    ("variable", "odd", "key"),
    [
        *(("RANK", "", "rank"), ("LOCAL_RANK", "x", "local_rank")),
        ("LOCAL_RANK", '1,"pid":2', "local_rank"),
        *(("TORCHELASTIC_ERROR_FILE", path, "error_file") for path in ERROR_FILES),
    ],
    ids=range(7),
)
def test_odd_values_in_the_environment_make_no_odd_line(interpreters, variable, odd, key):
    ran = interpreters.run(hooks=NEUTRAL, **{"RANK": "3", variable: odd})
    assert (ran.receipts[0]["outcome"], ran.receipts[0].get(key)) == ("applied", None)
    assert ran.messages() == []


def test_a_ranks_start_needs_neither_json_nor_re(interpreters):
    show = "import sys; print(' '.join(sorted(sys.modules)))"
    bare = set(interpreters.run(show).out.split())
    environ = interpreters.environ(
        NEUTRAL,
        RANK="0",
        SAFERUN_AGENT_PID=str(os.getpid()),
        TORCHELASTIC_ERROR_FILE=str(interpreters.folder / "error.json"),
    )
    environ["SAFERUN_INJECT"] = json.dumps(
        json.loads(environ["SAFERUN_INJECT"]), separators=(",", ":")
    )
    with open_place() as place:  # a path in ASCII is read without json
        text = environ["SAFERUN_INJECT"].replace(
            json.dumps(str(interpreters.receipts))[1:-1], place
        )
        ran = interpreters.run(show, environ=environ | {"SAFERUN_INJECT": text})
        assert os.listdir(place)
    more = {m for m in set(ran.out.split()) - bare if not m.startswith("_saferun")}
    assert more <= {"_ctypes", "atexit", "faulthandler"}  # built in or there already


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_only_the_process_that_compiled_leaves_a_receipt(interpreters, start):
    rank = {"RANK": "0", "LOCAL_RANK": "0", "START": start}
    ran = interpreters.run(source("inject/compile_beside_workers"), hooks=NEUTRAL, **rank)
    assert ran.code == 0, ran.err
    assert len(list(interpreters.receipts.iterdir())) == 1
