"""The script of `gen-shell --plain` in a real bash: what it retries, locks, ends and passes on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import slow
from plain_scripts import KILLED, SEGFAULT, USER, script
from repo import ROOT
from scripts import NASTY, PROGRAMS, SAFERUN, STAYS, Machine, end, up
from users import root

from saferun.diagnosis import signatures
from saferun.export import plain

PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
SMI = """#!/bin/sh
case "$*" in
-L) {lines} ;;
*index,uuid*) {rows} ;;
*memory.used*) echo 3 ;;
esac
"""


def gpus(machine: Machine, count: int = 1) -> list[str]:
    """Put GPUs into the machine, whose nvidia-smi answers both the script and saferun."""
    uuids = machine.gpus(count)
    lines = "; ".join(
        f'echo "GPU {n}: NVIDIA H100 80GB HBM3 (UUID: {u})"' for n, u in enumerate(uuids)
    )
    rows = "; ".join(f'echo "{n}, {u}"' for n, u in enumerate(uuids))
    machine.program("nvidia-smi", SMI.format(lines=lines, rows=rows))
    return uuids


def torch_of_gpus(machine: Machine) -> dict[str, str]:
    """Put a python3 beside torchrun that imports a torch with GPUs; return its variables."""
    machine.program("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    fake = str(PROGRAMS / "fake_torch")
    return {"PYTHONPATH": fake, "TESTED": str(machine.tmp / "tested")}


# --- what it is made of --------------------------------------------------------------------------


def test_it_has_at_most_150_lines_for_every_shipped_profile(machine):
    lines = {
        name: script(machine, "--", "train.py", profile=name).read_text().count("\n")
        for name in PROFILES
    }
    assert {name: count for name, count in lines.items() if count > 150} == {}


@pytest.mark.parametrize("names", [["debug", "tf-rtx5090"], *slow(PROFILES)])
def test_shellcheck_and_shfmt_are_silent(machine, names):
    tools = Path(sys.executable).parent
    files = []
    for name in names:
        files.append(machine.tmp / f"{name}.sh")
        files[-1].write_text(script(machine, "--", "t.py", NASTY, profile=name).read_text())
    for tool in (["shellcheck"], ["shfmt", "-i", "2", "-ci", "-d"]):
        if not (tools / tool[0]).exists():
            pytest.skip(f"no {tool[0]} beside this Python")
        done = subprocess.run([tools / tool[0], *tool[1:], *files], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")


def test_its_messages_are_phrases_of_the_signs_of_that_kind(machine):
    known = signatures.load(machine.environ)
    says = {
        kind: {p for s in known.signs if s.kind == kind for p in s.says} for kind in known.kinds
    }
    marked = {name: kind.plain for name, kind in known.kinds.items() if kind.plain}
    assert len(marked) == 12
    for name, texts in marked.items():
        assert {signatures.needle(text) for text in texts} <= says[name], name


def test_a_check_tells_whether_it_would_be_made_again(machine):
    made = script(machine, "--", "train.py", SAFERUN_SET="")
    assert machine.gen_shell("--check", str(made)).stdout == f"{made}: up to date\n"
    made.write_text(made.read_text().replace("ATTEMPTS=3", "ATTEMPTS=4"))
    done = machine.gen_shell("--check", str(made))
    assert (done.returncode, "would be `ATTEMPTS=3" in done.stdout) == (1, True)


def test_it_is_not_for_slurm(machine):
    done = machine.gen_shell("--plain", "--slurm", "--", "train.py")
    assert (done.returncode, "--plain is for one machine" in done.stderr) == (2, True)


# --- what the job gets ---------------------------------------------------------------------------


def test_values_and_arguments_survive(machine):
    text = yaml.safe_dump(
        {"schema": 1, "name": "mine", "env": {"MINE": NASTY, "YOURS": "theirs", "LAST": "x"}}
    )
    (machine.cwd / "mine.yaml").write_text(text)
    made = script(
        machine, "--set", "env.LAST=always", "--", "t.py", NASTY, "", profile="./mine.yaml"
    )
    ran = machine.run(["bash", made, NASTY], YOURS=NASTY, LAST=NASTY)
    assert (ran.status, ran.err) == (0, "")
    got = ran.received[1]
    assert got.argv[1:] == ["t.py", NASTY, "", NASTY]
    assert [got.env[name] for name in ("MINE", "YOURS", "LAST")] == [NASTY, NASTY, "always"]


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
    gpus(machine, 2)
    made = script(machine, "--", "train.py", profile="h100-llava", SAFERUN_SET="preflight.mode=off")
    ran = machine.run(["bash", made], **exported)
    assert {name: ran.received[1].env.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("version", "given"), [("2004001", True), ("2005000", False), ("0", False)]
)
def test_a_condition_is_decided_where_it_runs(machine, version, given):
    made = script(machine, "--", "train.py", profile="h100-nanochat")
    machine.program("python3", f"#!/bin/sh\necho {version}\n")
    (name,) = re.findall(r"^! \(\(torch .*\)\) \|\| default (\w+)", made.read_text(), re.MULTILINE)
    assert (name in machine.run(["bash", made]).received[1].env) is given


def test_a_count_of_gpus_is_a_condition_too(machine):
    made = script(machine, "--", "train.py", profile="rtx4090")
    for count, given in ((1, None), (2, "1")):
        gpus(machine, count)
        assert machine.run(["bash", made]).received[1].env.get("NCCL_P2P_DISABLE") == given


def test_disabled_it_is_plain_torchrun(machine):
    made = script(machine, "--", "train.py", profile="h100")
    ran = machine.run(["bash", made, "more"], SAFERUN_DISABLE="1")
    assert ran.received[0].argv[1:] == ["train.py", "more"]
    assert "CUDA_DEVICE_ORDER" not in ran.received[0].env


def test_output_is_passed_on_byte_for_byte_and_in_order(machine):
    code = "[os.write(n % 2 + 1, b'%d\\0\\xff' % n) for n in range(300)]"
    made = script(machine, "--", "train.py")
    expected = b"".join(b"%d\0\xff" % n for n in range(300))
    line = f"bash '{made}' 2>&1 | cat >both; bash '{made}' >out 2>err"
    assert machine.run(["bash", "-c", line], ends=[{"code": code}]).status == 0
    both, out, err = ((machine.cwd / name).read_bytes() for name in ("both", "out", "err"))
    assert both == expected
    assert out == b"".join(b"%d\0\xff" % n for n in range(0, 300, 2))
    assert err == b"".join(b"%d\0\xff" % n for n in range(1, 300, 2))


# --- what its end means --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "failure", [SEGFAULT, KILLED, {"status": 143}], ids=["SEGV", "KILL", "143"]
)
def test_a_crash_that_passes_is_tried_again(machine, failure):
    made = script(machine, "--set", "retry.resume_args=[--resume]", "--", "train.py")
    ran = machine.run(["bash", made], ends=[failure, {}])
    assert ran.status == 0, ran.err
    assert [got.argv[1:] for got in ran.received.values()] == [
        ["train.py"],
        ["train.py", "--resume"],
    ]
    assert "attempt 2 starts in 0 s" in ran.err


def test_attempts_are_bounded_and_the_status_is_that_of_the_last(machine):
    ran = machine.run(["bash", script(machine, "--", "t.py")], ends=[SEGFAULT, SEGFAULT, KILLED])
    assert (ran.status, list(ran.received)) == (137, [1, 2, 3])
    assert "attempt 3 failed (status 137): signal-9; stopped" in ran.err


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (USER, "exception; KeyError: 'label'"),
        ({"stderr": "srun: error: Detected 1 oom_kill event", "status": 1}, "host-oom-killed"),
        ({"stderr": "torch.OutOfMemoryError: CUDA out of memory.", "status": 1}, "cuda-oom"),
        ({"status": 3}, "nothing known"),
        ({"code": "os.kill(os.getpid(), 4)"}, "signal-4"),
    ],
)  # fmt: skip
def test_what_cannot_pass_stops_at_once(machine, failure, kind):
    ran = machine.run(["bash", script(machine, "--", "t.py")], ends=[failure])
    assert list(ran.received) == [1]
    assert f"failed (status {ran.status}): {kind}" in ran.err


def test_an_exception_counts_more_than_what_other_ranks_saw_of_it(machine):
    lost = "[rank1]: RuntimeError: Connection closed by peer [127.0.0.1]:422\n"
    made = script(machine, "--", "t.py")
    ran = machine.run(["bash", made], ends=[{"stderr": lost + USER["stderr"], "status": 1}])
    assert list(ran.received) == [1]
    assert list(machine.run(["bash", made], ends=[{"stderr": lost, "status": 1}, {}]).received) == [
        1,
        2,
    ]


@root
@pytest.mark.parametrize("more", [0, 1])
def test_a_kill_for_want_of_memory_stops_and_another_one_passes(machine, more):
    """The kernel's count is bound to a file, which the job raises."""
    count = machine.tmp / "vmstat"
    count.write_text("nr_free_pages 5\noom_kill 7\n")
    code = f"open({str(count)!r}, 'w').write('oom_kill {7 + more}\\n'); os.kill(os.getpid(), 9)"
    made = script(machine, "--", "t.py")
    line = f"mount --bind '{count}' /proc/vmstat && exec bash '{made}'"
    ran = machine.run(["unshare", "-m", "bash", "-c", line], ends=[{"code": code}, {}])
    assert list(ran.received) == ([1] if more else [1, 2]), ran.err


def judged(machine: Machine, logs: list[bytes], statuses: list[int]) -> list[str]:
    """Return the verdicts that the script's own functions give, all from one bash."""
    text = script(machine, "--", "t.py").read_text()
    functions = text[text.index("stops() {") : text.index("# --- The loop")]
    for number, log in enumerate(logs):
        (machine.tmp / f"log-{number}").write_bytes(log[-65536:])
    loop = 'killed=$(oom_kills)\nfor status; do text=$(tr -d "\\0" <"log-$n"); n=$((n + 1))\n'
    loop += 'judge; echo "${verdict:-stop}"; done\n'
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"n=0\n{functions}\n{loop}", "-", *map(str, statuses)],
        cwd=machine.tmp, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


# Kinds that the dozen messages cannot tell from one that passes; attempts are bounded. An
# out-of-memory kill is told by the kernel's count, which a log has not.
TRIED_AGAIN = {
    *("host-oom-killed", "port-hardcoded", "stale-rendezvous-store", "cudnn-wrong-version"),
    *("nccl-timeout-slow-rank", "cuda-exclusive-mode-conflict", "crash-after-the-end"),
}


@pytest.mark.parametrize("every", [False, *slow(True)])
def test_of_recorded_failures_none_that_cannot_pass_is_tried_again(machine, every):
    known = signatures.load(machine.environ).kinds
    rows = yaml.safe_load((ROOT / "tests/records/failures/kinds.yaml").read_text())
    rows = [row for row in rows if row.get("log") and row["kind"] in known]
    rows = [row for row in rows if every or known[row["kind"]].plain]
    codes = [row.get("exit_code") or 1 for row in rows]
    statuses = [code if code >= 0 else 128 - code for code in codes]
    verdicts = judged(machine, [row["log"].encode() for row in rows], statuses)
    wrong = [
        row["name"]
        for row, verdict in zip(rows, verdicts, strict=True)
        if verdict == "retry" and not plain.passes(known[row["kind"]])
        if row["kind"] not in TRIED_AGAIN
    ]
    assert wrong == []
    if not every:
        tried = {row["kind"] for row, v in zip(rows, verdicts, strict=True) if v == "retry"}
        assert tried >= {name for name, kind in known.items() if kind.plain and plain.passes(kind)}


# --- the GPUs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "policy"),
    [
        ("plain", "refuse"),
        ("live", "wait"),
        *slow(("live", "refuse"), ("plain", "wait"), ("plain", "warn"), ("live", "warn")),
    ],
)
def test_a_plain_script_and_a_live_run_see_each_other(machine, first, policy):
    gpus(machine)
    sets = f"locks.gpus={policy} locks.wait_s={60 if policy == 'wait' else 0}"
    commands = {
        "plain": ["bash", script(machine, "--", "t.py", profile="h100", SAFERUN_SET=sets)],
        "live": [*SAFERUN, "--profile", "h100", "train.py"],
    }
    holder = machine.start(commands[first], "first", ends=STAYS)
    up(machine, "first")
    second = "live" if first == "plain" else "plain"
    other = machine.start(commands[second], "second", SAFERUN_SET=sets)
    assert other.stderr is not None
    if (second, policy) != ("plain", "wait"):  # it waits in flock(1) and says nothing
        assert "in use by" in other.stderr.readline()
    if policy == "wait":
        holder.terminate()
    status, _ = end(other)
    assert status == (75 if policy == "refuse" else 0)
    assert list(machine.received("second")) == ([] if policy == "refuse" else [1])
    holder.terminate()
    assert end(holder)[0] == 9


def test_a_live_run_names_the_script_that_holds_its_gpu(machine):
    gpus(machine)
    holder = machine.start(["bash", script(machine, "--", "t.py", profile="h100")], "a", ends=STAYS)
    up(machine, "a")
    live = [*SAFERUN, "--profile", "h100", "train.py"]
    ran = machine.run(live, "b", SAFERUN_SET="locks.gpus=refuse")
    assert (ran.status, f"in use by pid {holder.pid} of user" in ran.err) == (75, True)
    holder.terminate()
    end(holder)
    assert machine.run(live, "b", SAFERUN_SET="locks.gpus=refuse").status == 0
    assert not list(Path("/run/lock/saferun").glob(f"holder.*.{holder.pid}.*"))


def test_another_gpu_is_free_and_so_is_an_ancestors(machine):
    uuids = gpus(machine, 2)
    sets = "locks.gpus=refuse"
    made = script(machine, "--", "t.py", profile="h100", SAFERUN_SET=sets)
    holder = machine.start(["bash", made], "a", ends=STAYS, CUDA_VISIBLE_DEVICES="1")
    up(machine, "a")
    assert machine.run(["bash", made], "b", CUDA_VISIBLE_DEVICES="1").status == 75
    assert machine.run(["bash", made], "b", CUDA_VISIBLE_DEVICES=uuids[1][:12]).status == 75
    assert machine.run(["bash", made], "b", CUDA_VISIBLE_DEVICES="0").status == 0
    assert machine.run(["bash", made], "b", SAFERUN_LOCKS=f"1:1:{uuids[1]}").status == 0
    holder.terminate()
    end(holder)


@pytest.mark.parametrize(("mode", "status"), [("require", 69), ("warn", 0)])
def test_every_gpu_is_tested_before_the_job(machine, mode, status):
    gpus(machine, 2)
    environ = torch_of_gpus(machine)
    made = script(machine, "--", "t.py", profile="h100", SAFERUN_SET=f"preflight.mode={mode}")
    ran = machine.run(["bash", made], **environ, BAD="1")
    assert ran.status == status
    assert f"a GPU fails its test (preflight.mode: {mode})" in ran.err
    assert Path(environ["TESTED"]).read_text() == "cuda:0\ncuda:1\n"
    assert machine.run(["bash", made], **environ).messages == []


def test_after_a_failure_of_cuda_the_gpus_are_tested_again(machine):
    gpus(machine)
    environ = torch_of_gpus(machine)
    failure = {"stderr": "RuntimeError: CUDA error: unspecified launch failure\n", "status": 1}
    made = script(machine, "--", "t.py", profile="h100")
    ran = machine.run(["bash", made], ends=[failure, {}], **environ)
    assert (ran.status, list(ran.received)) == (0, [1, 2]), ran.err
    assert Path(environ["TESTED"]).read_text() == "cuda:0\n"
