"""The script of `gen-shell --plain` in a real bash: what its job gets, when it is tried again.

What its hooks do is in test_plain_hooks.py.
"""

import ast
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import slow
from helpers import until
from repo import ROOT
from sandbox import no_driver, text_of, write
from scripts import NASTY, PROGRAMS, STAYS, Machine, end, signals, up
from terminals import start

PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
HOOKS = {path.stem: text_of(path) for path in (ROOT / "shell" / "hooks").glob("*.py")}
TOOLS = Path(sys.executable).parent
PYTHON = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'


@pytest.fixture
def machine(machine: Machine) -> Machine:
    machine.program("python3", PYTHON)  # of conditions: one that has torch
    return machine


def script(machine: Machine, *argv: str, profile: str = "cpu", **environ: str) -> Path:
    environ = {"SAFERUN_SET": "retry.backoff_s='[0, 0]'", **environ}
    return machine.script("--plain", "--profile", profile, *argv, **environ)


def starts(machine: Machine) -> list[list[str]]:
    return [json.loads(line) for line in text_of(machine.records("x") / "all").splitlines()]


# --- the text ------------------------------------------------------------------------------------


def test_it_has_at_most_200_lines_60_more_for_slurm_and_the_linters_are_silent(machine):
    files = []
    for name in PROFILES:
        for extra, most in (((), 200), (("--slurm",), 260)):
            files.append(machine.folder / f"{name}{''.join(extra)}.sh")
            text = text_of(script(machine, *extra, "--", "t.py", NASTY, profile=name))
            write(files[-1], text)
            assert text.count("\n") <= most, files[-1]
            assert "#@" not in text
            assert "shellcheck" not in text
    for tool in (["shellcheck", "-e", "SC2016"], ["shfmt", "-i", "2", "-ci", "-d"]):
        if not (TOOLS / tool[0]).exists():
            pytest.skip(f"no {tool[0]} beside this Python")
        done = subprocess.run([TOOLS / tool[0], *tool[1:], *files], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


def test_each_hook_stands_in_it_as_in_its_file_and_only_where_the_profile_asks(machine):
    held = {}
    for name in PROFILES:
        text = text_of(script(machine, "--", "t.py", profile=name))
        held[name] = {stem for stem, hook in HOOKS.items() if hook in text}
        if held[name]:
            code = text.partition("<<'PYTHON'\n")[2].partition("\nPYTHON\n")[0]
            ast.parse(code)
    cuda = {"start", "end", "init", "order"}
    assert held["cpu"] == held["resume-hf"] == set()
    assert held["cuda"] == held["h100"] == cuda
    assert held["h100-nanochat"] == cuda | {"inductor", "autotune", "cudagraphs"}
    assert held["h100-llava"] == cuda | {"compile"}
    assert held["ddp-safe"] == cuda | {"inductor", "cudagraphs", "cudagraph_markers"}
    assert held["debug"] == cuda | {"guards", "guard_labels", "guard_logits", "guard_embeddings"}
    assert held["hpo"] == {"start", "end", "guards", "guard_labels", "guard_logits", "memory"}
    assert held["tf-rtx5090"] == {"start", "end", "cross_device_ops"}
    assert set().union(*held.values()) == set(HOOKS)


def test_the_head_names_what_it_leaves_out(machine):
    head = text_of(script(machine, "--", "t.py", profile="hpo"))[:1500]
    left = "locks.slot_memory_gib, hooks.optuna.mode, start.ranks, hooks.excepthook"
    assert all(key in head for key in left.split(", ")), head
    assert "hooks.guards.labels" not in head


def test_a_check_tells_whether_it_would_be_made_again(machine):
    for extra in ((), ("--slurm", "--nodes", "2")):
        made = script(machine, *extra, "--", "train.py", SAFERUN_SET="")
        assert machine.gen_shell("--check", str(made)).stdout == f"{made}: up to date\n"
        write(made, text_of(made).replace("attempts=3", "attempts=4"))
        done = machine.gen_shell("--check", str(made))
        assert (done.returncode, "would be `attempts=3" in done.stdout) == (1, True)


# --- what the job gets ---------------------------------------------------------------------------


def test_values_and_arguments_survive(machine):
    text = yaml.safe_dump(
        {"schema": 1, "name": "mine", "env": {"MINE": NASTY, "YOURS": "theirs", "LAST": "x"}}
    )
    write(machine.cwd / "mine.yaml", text)
    made = script(
        machine, "--set", "env.LAST=always", "--", "t.py", NASTY, "", profile="./mine.yaml"
    )
    ran = machine.run(["bash", made, NASTY], YOURS=NASTY, LAST=NASTY)
    assert (ran.status, ran.err) == (0, "")
    got = ran.received[1]
    assert got.argv[1:] == ["t.py", NASTY, "", NASTY]
    assert [got.env[name] for name in ("MINE", "YOURS", "LAST")] == [NASTY, NASTY, "always"]
    assert [p.name for p in machine.temporary.iterdir()] == []


def test_the_job_gets_what_it_gets_from_saferun(machine):
    machine.gpus()
    made = script(machine, "--", "--nnodes=1", "train.py", "--lr=1", profile="h100-nanochat")
    plain = machine.run(["bash", made]).received[1]
    live = machine.script(
        "--profile", "h100-nanochat", "--", "--nnodes=1", "train.py", "--lr=1", name="live.sh"
    )
    full = machine.run(["bash", live], "live").received[1]
    assert plain.argv[-3:] == full.argv[-3:] == ["--nnodes=1", "train.py", "--lr=1"]
    names = ("CUDA_DEVICE_ORDER", "SAFERUN_ATTEMPT", "TORCHINDUCTOR_FX_GRAPH_CACHE")
    assert [plain.env.get(n) for n in names] == [full.env.get(n) for n in names]
    assert plain.env["PET_NPROC_PER_NODE"] == "gpu"
    assert "--nproc-per-node=gpu" in full.argv


@pytest.mark.parametrize(
    ("exported", "expected"),
    [
        ({}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PET_NPROC_PER_NODE": "gpu"}),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_DEVICE_ORDER": None}),
        ({"PET_NPROC_PER_NODE": "2"}, {"PET_NPROC_PER_NODE": "2"}),
        ({"PYTORCH_ALLOC_CONF": "x:1"}, {"PYTORCH_CUDA_ALLOC_CONF": None}),
    ],
    ids=str,
)
def test_what_is_exported_wins(machine, exported, expected):
    no_driver()  # where a driver is, tests export an empty CUDA_VISIBLE_DEVICES
    made = script(machine, "--", "train.py", profile="h100-llava")
    ran = machine.run(["bash", made], **exported)
    assert {name: ran.received[1].env.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("profile", "variable", "torch", "gpus", "value"),
    [
        ("h100-nanochat", "TORCHINDUCTOR_FX_GRAPH_CACHE", "__version__ = '2.4.1'", 1, "1"),
        ("h100-nanochat", "TORCHINDUCTOR_FX_GRAPH_CACHE", "__version__ = '2.5.0'", 1, None),
        ("h100-nanochat", "TORCHINDUCTOR_FX_GRAPH_CACHE", "raise ImportError", 1, None),
        ("rtx4090", "NCCL_P2P_DISABLE", "raise ImportError", 2, "1"),
        ("tf-rtx5090", "NCCL_P2P_DISABLE", "raise ImportError", 1, None),
    ],
)
def test_a_condition_is_decided_where_it_runs(machine, profile, variable, torch, gpus, value):
    made = script(machine, "--set=launcher=torchrun", "--", "train.py", profile=profile)
    machine.gpus(gpus)
    write(machine.folder / "torch.py", torch)
    ran = machine.run(["bash", made], PYTHONPATH=str(machine.folder))
    assert (ran.received[1].env.get(variable), ran.err) == (value, "")


# --- the lock ------------------------------------------------------------------------------------


def busy(machine: Machine, made: Path, **environ: str) -> tuple[int, str]:
    ran = machine.run(["bash", made], "second", **environ)
    return ran.status, ran.err


def test_two_scripts_on_a_gpu_know_of_each_other_as_the_policy_says(machine):
    first, second = machine.gpus(2)
    made = script(machine, "--", "t.py", profile="cuda")
    refuses = machine.script("--plain", "--profile=cuda", "--set=locks.gpus=refuse", name="r.sh")
    command = ["bash", "-c", 'umask 077 && exec bash "$0"', made]
    job = machine.start(command, ends=STAYS, CUDA_VISIBLE_DEVICES="0")
    up(machine)
    status, err = busy(machine, made)
    assert (status, first in err, second in err) == (0, True, False)
    status, err = busy(machine, refuses)
    assert (status, first in err) == (75, True)
    assert busy(machine, refuses, CUDA_VISIBLE_DEVICES=second) == (0, "")
    job.terminate()
    end(job)
    assert busy(machine, refuses) == (0, "")


def test_a_plain_script_and_saferun_know_of_each_other(machine):
    gpu = machine.gpus()[0]
    refuse = ("--profile", "cuda", "--set", "locks.gpus=refuse", "--", "train.py")
    plain = machine.script("--plain", *refuse, name="plain.sh")
    full = machine.script(*refuse, name="full.sh")
    for holder, other in ((plain, full), (full, plain)):
        job = machine.start(["bash", holder], ends=STAYS)
        up(machine)
        status, err = busy(machine, other)
        assert (status, gpu[:12] in err) == (75, True), err
        job.terminate()
        end(job)
        (machine.records("x") / "up").unlink()


def test_slots_are_counted_and_waited_for(machine):
    machine.gpus()
    settings = ("--set=locks.slots=2", "--set=locks.gpus=wait", "--set=locks.wait_s=0")
    made = script(machine, *settings, "--", "t.py")
    jobs = []
    for label in ("x", "y"):
        jobs.append(machine.start(["bash", made], label, ends=STAYS))
        up(machine, label)
    assert busy(machine, made)[0] == 75
    waits = script(machine, *settings[:2], "--set=locks.wait_s=600", "--", "t.py")
    third = machine.start(["bash", waits], "third")
    until(lambda: "sleep" in machine.living().values(), "it waits")
    for job in jobs:
        job.terminate()
        end(job)
    assert end(third)[0] == 0


def test_without_gpus_a_script_locks_itself(machine):
    made = script(machine, "--set=locks.gpus=refuse", "--", "t.py")
    other = machine.cwd / "other.sh"
    write(other, text_of(made))
    job = machine.start(["bash", made], ends=STAYS)
    up(machine)
    assert busy(machine, made)[0] == 75
    assert busy(machine, other)[0] == 0
    job.terminate()
    end(job)


# --- when it is tried again ----------------------------------------------------------------------

LOST = "RuntimeError: [/pytorch/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:7\n"
TAKEN = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local "
    "network address. port: 29500, useIPv6: false, code: -98, name: EADDRINUSE\n"
)
ABORTED = (
    "Root Cause (first observed failure):\n  traceback : Signal 6 (SIGABRT) received by PID 9\n"
)
LEFT_BY = "terminate called without an active exception\n"  # threads of gloo, as a rank exits


@pytest.mark.parametrize(
    ("failure", "status", "attempts"),
    [("segv", 0, 2), *slow(("peer", 0, 2), ("key", 1, 1), ("both", 1, 1)), ("agent", 0, 2)],
)
def test_torchrun_is_started_again_where_what_ended_it_may_pass(machine, failure, status, attempts):
    made = script(
        *(machine, "--set", "retry.resume_args=[--resume]", "--", "--standalone"),
        *("--nproc-per-node=2", str(PROGRAMS / "plain_ranks.py"), failure),
    )
    ran = machine.run(["bash", made], PATH=f"{TOOLS}:/usr/bin:/bin", OMP_NUM_THREADS="1")
    assert ran.status == status, ran.err
    started = sorted(text_of(machine.cwd / "started").splitlines())
    assert started == ["1 0", "1 1", *(["2 0 --resume", "2 1 --resume"] if attempts == 2 else [])]
    assert machine.living() == {}


@pytest.mark.parametrize(
    ("launcher", "last", "count"),
    [
        ("torchrun", {"stderr": LOST, "status": 1}, 3),
        ("torchrun", {"stderr": f"[rank1]: {LOST}", "status": 1}, 3),
        ("torchrun", {"stderr": f"{LOST}ValueError\n", "status": 1}, 1),
        ("torchrun", {"stderr": "a peer: connection closed by peer\n", "status": 1}, 1),
        ("torchrun", {"code": "os.kill(os.getpid(), 9)"}, 3),
        ("torchrun", {"stderr": ABORTED, "status": 1}, 3),
        ("torchrun", {"stderr": f"KeyError: 1\n{LEFT_BY}{ABORTED}", "status": 1}, 1),
        ("torchrun", {"status": 1}, 1),
        ("python", {"code": "os.kill(os.getpid(), 11)"}, 3),
        ("python", {"status": 1}, 1),
    ],
    ids=str,
)
def test_attempts_are_bounded_and_the_status_is_that_of_the_last(machine, launcher, last, count):
    machine.program("python3", text_of(machine.bin / "torchrun"))
    made = script(machine, "--set", f"launcher={launcher}", "--", "train.py")
    ran = machine.run(["bash", made], ends=[last])
    signalled = {"9": 137, "11": 139}.get(last.get("code", "")[-3:].strip(" ()"), 1)
    assert (ran.status, len(starts(machine))) == (signalled, count), ran.err
    assert list(ran.received) == [*range(1, count + 1)]
    assert last.get("stderr", "") in ran.err


MOVED = [
    (["--master-port=29500", "t.py"], ["--master-port=PORT", "t.py"]),
    (["--master_port", "29500", "t.py"], ["--master_port", "PORT", "t.py"]),
    (["--rdzv-backend=c10d", "--rdzv_endpoint=h1:29500"], [None, "--rdzv_endpoint=h1:PORT"]),
    (["--rdzv-endpoint", "[::1]:29500", "t.py"], [None, "[::1]:PORT", "t.py"]),
    (["--rdzv-backend=c10d", "--rdzv-endpoint=h:0", "t.py"], [None, "--rdzv-endpoint=h:0"]),
    (["--master-p", "29500", "t.py"], ["--master-p", "PORT", "t.py"]),
    (["--rdzv-b=c10d", "--rdzv_end=h1:29500", "t.py"], [None, "--rdzv_end=h1:PORT", "t.py"]),
]
ETCD = (["--rdzv-backend=etcd-v2", "--rdzv-endpoint=h:1", "t"], [None, "--rdzv-endpoint=h:1"])
# Known where the script is made: the number of nodes, and where SCRIPT begins.
KEPT = [
    (["-t3", "t.py", "--master-port=29500"], [None, "t.py", "--master-port=29500"]),
    (["--nnodes=2", "--master-port=29500", "t.py"], [None, "--master-port=29500", "t.py"]),
]


@pytest.mark.parametrize(
    ("given", "moved", "when"),
    [(*case, "made") for case in (*MOVED, *KEPT, ETCD)]
    + [(*case, "run") for case in (*MOVED, ETCD)],
    ids=str,
)
def test_a_port_that_is_taken_is_replaced_by_another(machine, given, moved, when):
    words = [*given, *(["t.py"] if not given[-1].startswith("t") else [])]
    made = script(machine, *(["--", *words] if when == "made" else []))
    ends = [{"stderr": TAKEN, "status": 1}, {}]
    ran = machine.run(["bash", made, *(words if when == "run" else [])], ends=ends)
    assert ran.status == 0, ran.err
    first, second = starts(machine)
    assert first == words
    port = ran.received[2].env.get("PET_MASTER_PORT", "29500")
    for old, new, expected in zip(first, second, moved, strict=False):
        assert new == (old if expected is None else expected.replace("PORT", port))
    is_moved = "PORT" in "".join(filter(None, moved))
    assert (first != second) is is_moved


@pytest.mark.parametrize("backend", ["c10d", "etcd-v2"])
def test_the_port_of_an_exported_endpoint_moves(machine, backend):
    """That of a service stays."""
    made = script(machine, "--", "t.py")
    exported = {"PET_RDZV_BACKEND": backend, "PET_RDZV_ENDPOINT": "[::1]:29400"}
    ran = machine.run(["bash", made], ends=[{"stderr": TAKEN, "status": 1}, {}], **exported)
    env = ran.received[2].env
    port = env["PET_MASTER_PORT"] if backend == "c10d" else "29400"
    assert env["PET_RDZV_ENDPOINT"] == f"[::1]:{port}", ran.err


def test_a_port_that_was_moved_stays_moved_when_a_checkpoint_is_found(machine):
    write(machine.cwd / "last.pt", "")
    resume = ["--set=retry.resume.checkpoints=*.pt", "--set=retry.resume.args=['{checkpoint}']"]
    made = script(machine, *resume, "--", "--master-port=29500", "t.py")
    ends = [{"stderr": TAKEN, "status": 1}, {"code": "os.kill(os.getpid(), 9)"}, {}]
    ran = machine.run(["bash", made], ends=ends)
    port = f"--master-port={ran.received[2].env['PET_MASTER_PORT']}"
    resumed = [port, "t.py", "last.pt"]
    assert starts(machine) == [["--master-port=29500", "t.py"], resumed, resumed], ran.err


LEAVES = """
import subprocess
left = subprocess.Popen(["sleep", "1000"], start_new_session=True, stdout=-3, stderr=-3)
open(place + "/left", "w").write(str(left.pid))
os.kill(os.getpid(), 9)
"""
LOOKS = """
path = "/proc/" + open(place + "/left").read() + "/cmdline"
print(os.path.exists(path) and open(path).read())
"""


def test_nothing_of_an_attempt_lives_when_the_next_begins(machine):
    made = script(machine, "--", "t.py")
    ran = machine.run(["bash", made], ends=[{"code": LEAVES}, {"code": LOOKS}])
    assert (ran.status, ran.out.strip() in ("False", "")) == (0, True), ran
    assert machine.living() == {}


def test_it_goes_on_from_the_newest_checkpoint(machine):
    (machine.cwd / "my out").mkdir()
    for age, step in enumerate((100, 20, 30)):
        (machine.cwd / "my out" / f"checkpoint-{step}").mkdir()
        os.utime(machine.cwd / "my out" / f"checkpoint-{step}", (1000 - age, 1000 - age))
    ends = [{"code": "os.kill(os.getpid(), 9)"}, {}]
    made = script(machine, "--", "t.py", profile="resume-hf")
    ran = machine.run(["bash", made, "--output-dir", "my out"], ends=ends)
    given = ["t.py", "--output-dir", "my out"]
    resumed = [*given, "--resume_from_checkpoint=my out/checkpoint-100"]
    assert (ran.status, starts(machine)) == (0, [given, resumed]), ran.err


@pytest.mark.parametrize(("depth", "folder"), [([], "d20"), (["--depth=8"], "d8")])
def test_placeholders_within_placeholders_and_steps_are_filled(machine, depth, folder):
    place = machine.cwd / "base dir" / "base_checkpoints" / folder
    place.mkdir(parents=True)
    write(place / "meta_000090.json", "{}")
    ends = [{"code": "os.kill(os.getpid(), 9)"}, {}]
    made = script(machine, "--", "t.py", *depth, profile="resume-nanochat")
    machine.run(["bash", made], ends=ends, NANOCHAT_BASE_DIR="base dir")
    assert starts(machine) == [["t.py", *depth], ["t.py", *depth, "--resume-from-step=90"]]


def test_without_a_checkpoint_it_begins_anew(machine):
    made = script(machine, "--", "t.py", profile="resume-hf")
    machine.run(["bash", made], ends=[{"code": "os.kill(os.getpid(), 9)"}, {}])
    assert starts(machine) == [["t.py"], ["t.py"]]


# --- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", *slow("SIGINT", "SIGHUP")])
def test_a_signal_reaches_the_job_once_and_ends_the_script(machine, name):
    job = machine.start(["bash", script(machine, "--", "t.py")], ends=STAYS)
    up(machine)
    for nothing in (signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        job.send_signal(nothing)
    job.send_signal(getattr(signal, name))
    assert end(job) == (-getattr(signal, name), "")
    assert signals(machine) == name
    assert len(starts(machine)) == 1
    until(lambda: not machine.living(), "nothing is left")
    assert not list(machine.temporary.iterdir())


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("asked", [False, True], ids=["end", "signal"])
def test_what_removes_the_files_ends_before_the_script(machine, retries, asked):
    made = script(machine, "--retries", str(retries), "--", "t.py")
    # Slow enough that it would outlive the script; its streams are nobody's to wait for.
    machine.program("rm", '#!/bin/sh\nsleep 0.5\nexec /bin/rm "$@"\n')
    line = ["bash", "-c", 'exec "$@" >/dev/null 2>&1', "-", "bash", made]
    job = machine.start(line, ends=STAYS if asked else [{}])
    if asked:
        up(machine)
        job.terminate()
    assert end(job)[0] == (-signal.SIGTERM if asked else 0)
    assert not {"rm", "grep"}.intersection(machine.living().values())
    assert not list(machine.temporary.iterdir())


def test_a_ctrl_c_reaches_the_job_once(machine):
    made = script(machine, "--", "train.py")
    extra = {"RECORDS": str(machine.records("x")), "ENDS": json.dumps(STAYS)}
    pid, fd = start(["bash", str(made)], machine.cwd, {**machine.environ, **extra})
    up(machine)
    assert pid not in {os.getsid(one) for one, name in machine.living().items() if name == "python"}
    os.write(fd, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGINT
    os.close(fd)
    assert signals(machine) == "SIGINT"


def test_after_a_sigkill_of_the_script_nothing_lives_on(machine):
    job = machine.start(["bash", script(machine, "--", "t.py")], ends=STAYS)
    up(machine)
    job.kill()
    job.wait()
    until(lambda: not machine.living(), "nothing is left")
    until(lambda: not list(machine.temporary.iterdir()), "the directory is gone")
    end(job)


def test_a_signal_between_attempts_ends_the_script(machine):
    made = script(machine, "--", "t.py", SAFERUN_SET="retry.backoff_s='[600, 600]'")
    job = machine.start(["bash", made], ends=[{"code": "os.kill(os.getpid(), 9)"}])
    assert job.stderr is not None
    assert any("starts in 600 s" in line for line in iter(job.stderr.readline, ""))
    job.send_signal(signal.SIGQUIT)
    until(lambda: "sleep" in machine.living().values(), "it waits")
    job.terminate()
    assert end(job)[0] == -signal.SIGTERM
    until(lambda: not machine.living(), "nothing is left")
