"""The script of `gen-shell`, run: torchrun gets from it what it gets from saferun."""

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from cases import slow
from repo import ROOT, read_yaml
from sandbox import SAFERUN, text_of, write
from scripts import NASTY, RECORDING, Machine, Received

from saferun.export.bundle_main import OF_BASH

PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
LINE = ["--nproc-per-node=2", "train.py", "--lr", "3e-4", "two words", NASTY]
NO_TRIAL = {"SAFERUN_SET": "preflight.mode=off"}  # there is no GPU to try
EXPORTED = {
    "nothing": {},
    "what profiles set": {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "NCCL_DEBUG": "WARN",
        "NCCL_P2P_DISABLE": "0",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "PYTHONPATH": "/mine:/too",
    },
    "a scheduler's GPUs": {"CUDA_VISIBLE_DEVICES": "0", "NPROC": "1", "MINE": NASTY},
    "torchrun's": {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "1", "EMPTY": ""},
    "saferun's": {"SAFERUN_RETRIES": "1", "SAFERUN_RUN_DIR": "runs here", "SAFERUN_PROFILE": ""},
}
GPUS = {
    path.stem: read_yaml(text_of(path)).get("match", {}).get("gpu")
    for path in (ROOT / "profiles").glob("*.yaml")
}
GPUS |= {"h100-llava": ["H100"], "h100-nanochat": ["H100"], "tf-rtx5090": ["RTX 5090"]}
QUICK = ("h100", "cpu", "tf-rtx5090")
# Each profile beside one way to export, and each of these beside several profiles.
PAIRS = [
    pytest.param(p, e, id=f"{p}-{e}", marks=[] if p in QUICK else pytest.mark.slow)
    for p, e in zip(PROFILES, itertools.cycle(EXPORTED))
]


@pytest.mark.parametrize(("profile", "exported"), PAIRS)
def test_torchrun_gets_the_same_from_a_script_and_from_saferun(machine, profile, exported):
    fragment = (GPUS.get(profile) or ["H100"])[0]
    machine.gpus(2, f"NVIDIA {fragment} of some size")
    line = LINE[1:] if profile in ("hpo", "tf-rtx5090") else LINE  # launcher: python
    environ = {**NO_TRIAL, **EXPORTED[exported]}
    script = machine.script("--profile", profile, "--", *line)
    ours = machine.run([*SAFERUN, "--profile", profile, *line], "live", **environ)
    theirs = machine.run(["bash", script], "script", **environ)
    assert theirs.received == ours.received
    assert len(ours.received) == 1
    assert (theirs.status, theirs.out) == (ours.status, ours.out) == (0, "")
    assert after_origin(theirs.messages) == after_origin(ours.messages)
    # Without attempts torchrun takes the script's place, and the next script removes it.
    assert len(machine.unpacked()) == (profile == "debug" and exported != "saferun's")


def after_origin(messages: list[str]) -> list[str]:
    """Return the lines without their beginning, which names the script or the option.

    Left out are those about the torch beside saferun: a script has none.
    """
    kept = [line for line in messages if "has no reader in torch" not in line]
    return [line.partition("(from")[2].partition(")")[2] for line in kept]


@pytest.mark.parametrize(
    "argv",
    [
        ["--nproc_per_node", "2", "--", "train.py", "--", "-x"],
        ["--frobnicate", "train.py"],
        *slow((["-t3", "--master_port=0", "train.py", "", " "],), (["gone.py"],)),
    ],
    ids=" ".join,
)
def test_arguments_given_when_it_is_run_are_torchruns_own(machine, argv):
    script = machine.script("--profile", "cpu")
    ours = machine.run([*SAFERUN, "--profile", "cpu", *argv], "live")
    theirs = machine.run(["bash", script, *argv], "script")
    assert theirs.received == ours.received
    assert (len(ours.received), theirs.status) == (0 if ours.status else 1, ours.status)
    assert after_origin(theirs.messages) == after_origin(ours.messages)


def test_the_environment_is_the_callers_to_the_last_name(machine):
    """Bash counts SHLVL up, sets `_` and PWD and knows no name with a dot.

    The script has variables of its own: every word in it is exported here, as if it were one.
    """
    (machine.bin / "our-python").symlink_to(sys.executable)  # no shell on the way to it
    machine.program("torchrun", f"#!/usr/bin/env -S our-python -IB\n{RECORDING}")
    text = text_of(ROOT / "shell" / "run.sh")
    special = ("PATH", "HOME", "TMPDIR", "XDG_", "BASH", "PYTHON", "SAFERUN", "ends")
    arguments = [w for w in set(re.findall(r"[A-Za-z_]\w*", text)) if not w.startswith(special)]
    environ = dict.fromkeys((*OF_BASH, *arguments), "mine") | {"SHLVL": "7", "a.b-c": "d"}
    environ |= {"SHELLOPTS": "braceexpand", "BASHOPTS": "cmdhist", "BASH_FUNC_sleep%%": "() { :; }"}
    environ |= {"POSIXLY_CORRECT": "1", "BASH_ENV": "", "LC_ALL": "C.UTF-8", "COLUMNS": "80"}
    environ["PATH"] = f"{machine.environ['PATH']}:{Path(sys.executable).parent}"  # has saferun
    script = machine.script("--profile", "cpu", "--", "train.py")
    ours = machine.run([*SAFERUN, "--profile", "cpu", "train.py"], "live", **environ)
    theirs = machine.run(["bash", script], "script", **environ)
    assert theirs.status == 0, theirs.err
    assert sorted(theirs.received[1].env.items()) == sorted(ours.received[1].env.items())
    assert theirs.received[1].env["SHLVL"] == "7"
    assert theirs.status == ours.status == 0


H100 = ["--profile", "h100"]
HOW_NAMED = {  # words, exported, the text of ./saferun.yaml, and how ranks start
    "by the option": (H100, {}, "", "warm"),
    "by the variable": ([], {"SAFERUN_PROFILE": "h100"}, "", "warm"),
    "by a file of the directory": ([], {}, "extends: [h100]", "warm"),
    "not: it is detected": ([], {}, "", "spawn"),
    "with --set": ([*H100, "--set", "start.ranks=spawn"], {}, "", "spawn"),
    "with a file that says otherwise": ([], {}, "extends: [h100]\nstart: {ranks: spawn}", "spawn"),
    "for one attempt": ([*H100, "--retries", "0"], {}, "", "spawn"),
}


@pytest.mark.parametrize(
    ("words", "exported", "file", "ranks"), HOW_NAMED.values(), ids=list(HOW_NAMED)
)
def test_ranks_are_warm_where_a_shipped_gpu_profile_is_named(machine, words, exported, file, ranks):
    machine.gpus(2)
    if file:
        write(machine.cwd / "saferun.yaml", f"schema: 1\nname: ours\n{file}\n")
    shown = machine.command("plan", "--json", *words, "train.py", **exported).stdout
    assert json.loads(shown)["start"] == {"ranks": ranks}
    text = machine.command("plan", *words, "train.py", **exported).stdout
    start = re.search(r"warm: .*\(start\.ranks\)\s+\[(.*)\]", text)
    assert (start and start[1]) == ("profiles/cuda.yaml" if ranks == "warm" else None)


@pytest.mark.parametrize("how", ["by the option", "not: it is detected", "for one attempt"])
def test_a_script_starts_ranks_as_saferun_does(machine, how):
    words, _, _, ranks = HOW_NAMED[how]
    machine.gpus(2)
    script = machine.script(*words, "--", "train.py")
    ours = machine.run([*SAFERUN, *words, "train.py"], "live", **NO_TRIAL)
    theirs = machine.run(["bash", script], "script", **NO_TRIAL)
    assert ["; warm ranks" in one.messages[0] for one in (ours, theirs)] == [ranks == "warm"] * 2
    assert theirs.received == ours.received


def test_what_was_set_beats_what_is_exported_as_under_saferun(machine):
    sets = ["--set", f"env.NCCL_DEBUG={NASTY}", "--set", "hooks.compile.autotune=off"]
    sets += ["--set", "env.PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:32", "--retries", "4"]
    script = machine.script(*sets, "--profile", "cpu", "--", "train.py")
    environ = {"NCCL_DEBUG": "WARN", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,a:b"}
    environ["SAFERUN_SET"] = "hooks.compile.cudagraphs=off retry.backoff_s='[1, 2]'"
    ours = machine.run([*SAFERUN, *sets, "--profile", "cpu", "train.py"], "live", **environ)
    theirs = machine.run(["bash", script], "script", **environ)
    assert theirs.received == ours.received
    assert theirs.received[1].env["NCCL_DEBUG"] == NASTY


def test_what_is_edited_into_the_script_counts(machine):
    script = machine.script("--profile", "h100", "--", "train.py")
    text = text_of(script).replace("ORDER PCI_BUS_ID\n", "ORDER FASTEST_FIRST\n")
    write(script, text.replace("set -euo pipefail\n", "set -euo pipefail\nexport MINE=1\n"))
    env = machine.run(["bash", script], **NO_TRIAL).received[1].env
    assert (env["CUDA_DEVICE_ORDER"], env["MINE"]) == ("FASTEST_FIRST", "1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("setting retry.atempts 3", "unknown key `retry.atempts`"),
        *slow(
            ("export_default 1X y", "`1X` cannot be a variable's name"),
            ("when torch~2 setting retry.attempts 3", "`torch~2` is not a condition"),
            ("when 'gpus>1.5' setting retry.attempts 3", "`gpus>1.5` is not a condition"),
        ),
    ],
)
def test_a_setting_that_was_edited_to_nonsense_is_refused_by_name(machine, line, message):
    script = machine.script("--profile", "cpu", "--", "train.py")
    text = text_of(script)
    write(script, text.replace("\n# --- The job", f"\n{line}\n\n# --- The job", 1))
    ran = machine.run(["bash", script])
    assert (ran.status, ran.received) == (78, {}), ran.err
    assert message in ran.err
    assert "run it.sh" in ran.err
    assert machine.unpacked() == []


# --- attempts ------------------------------------------------------------------------------------

OOM = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a "
    "total capacity of 79.11 GiB of which 1.94 GiB is free. Of the allocated memory 60.00 GiB is "
    "allocated by PyTorch, and 15.00 GiB is reserved by PyTorch but unallocated. If reserved but "
    "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n"
)
PORT = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address "
    "already in use\n"
)
KEY_ERROR = '[rank0]: Traceback (most recent call last):\n[rank0]: KeyError: "label"\n'
KILL = {"code": "os.kill(os.getpid(), 9)"}
QUICKLY = {"SAFERUN_SET": "retry.backoff_s='[0, 0]'"}


@pytest.mark.parametrize(
    ("ends", "attempts"),
    [
        ([{"stderr": PORT, "status": 1}, {"stderr": OOM, "status": 1}, {}], 3),
        ([KILL, {"status": 75}], 2),
        *slow(([{"stderr": OOM, "status": 3}, {"stderr": KEY_ERROR, "status": 7}], 2)),
    ],
    ids=["two-mitigations", "killed-then-75", "mitigation-then-user"],
)
def test_a_sequence_of_faults_makes_the_same_attempts(machine, ends, attempts):
    script = machine.script("--profile", "cpu", "--", *LINE)
    ours = machine.run([*SAFERUN, "--profile", "cpu", *LINE], "live", ends=ends, **QUICKLY)
    forget(machine)
    theirs = machine.run(["bash", script], "script", ends=ends, **QUICKLY)
    assert len(ours.received) == attempts, ours.err
    assert alike(theirs.received) == alike(ours.received)
    assert theirs.status == ours.status
    assert [ages(s) for s in theirs.messages[1:]] == [ages(s) for s in ours.messages[1:]]
    assert journals(machine)[0] == journals(machine)[1]


def forget(machine: Machine) -> None:
    (machine.home / ".local/state/saferun/mitigations.json").unlink(missing_ok=True)


def alike(received: dict[int, Received]) -> dict[int, Received]:
    """A free port, a fresh id and a directory of the run's own are never the same twice."""
    made = r"(?<=--master-port=)\d+|(?<=--rdzv-id=saferun-)\w+|(?<=saferun-cache-)\w+"
    return json.loads(re.sub(made, "MADE", json.dumps(received)))


def ages(line: str) -> str:
    return re.sub(r"\d+(\.\d+)? s\b", "N s", line)


def journals(machine: Machine) -> list[list[tuple]]:
    """What the journals say happened, without times and names."""
    found = []
    for path in sorted((machine.home / ".local/state/saferun/runs").glob("*/events.jsonl")):
        events = [json.loads(line) for line in text_of(path).splitlines()]
        keys = ("event", "attempt", "status", "kind", "fingerprint", "action", "reason", "add")
        found.append([tuple(str(event.get(key)) for key in keys) for event in events])
    return found
