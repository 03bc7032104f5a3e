"""Bringing GPUs back: real processes and directories, a recording nvidia-smi, never a real GPU."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakecuda import Machine, Smi, card, compiled, driver_files, uuid
from repo import source

from saferun.diagnosis.signatures import load as load_failures
from saferun.gpu import lock_dir, nvidia_smi, orphans, preflight_gate, recovery
from saferun.gpu.cuda_errors import AFTER, DRAIN, LEFTOVERS, RESET
from saferun.journal import writer
from saferun.journal.event_types import RunEnded
from saferun.model import NOTE, OK, PROBLEM, Gpu, GpuFacts
from saferun.supervise.probes import Probes
from saferun.system import procfs, redact

A = uuid(0)
GPU = Gpu(0, A, "NVIDIA Fake")
LOOK = [" ".join(nvidia_smi.QUERY), " ".join(nvidia_smi.APPS)]


@pytest.fixture
def smi(tmp_path: Path) -> Smi:
    return Smi(tmp_path / "bin")


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    return tmp_path / "dev"


class Stand:
    """Where a recovery is tried: our own devices, a root that is none, no waiting."""

    def __init__(self, smi: Smi, dev: Path) -> None:
        self.smi, self.dev = smi, dev
        self.runs = dev.parent / "runs"
        driver = str(driver_files(dev.parent / "driver"))
        self.world = recovery.World(True, True, str(dev), driver, sleep=lambda s: None)
        self.environ = {"PATH": f"{smi.folder}:/usr/bin:/bin", "TMPDIR": str(dev.parent)}

    def recover(self, *asks, **options):
        scope = recovery.Scope((GPU,), self.environ, str(self.runs))
        options = {"world": self.world, "drain_s": 0.3, **options}
        return recovery.recover(scope, asks, **options)

    def reset(self, *, world=None, **terms):
        idle = {"policy": "when-idle", "alone": lambda: True, "suspects": [A]}
        terms = recovery.ResetTerms(**{**idle, **terms})
        return self.recover(RESET, terms=terms, world=world or self.world)

    @property
    def was_reset(self) -> bool:
        return any("reset" in argv for argv in self.smi.asked)


@pytest.fixture
def stand(smi: Smi, dev: Path) -> Stand:
    return Stand(smi, dev)


@contextlib.contextmanager
def holder(dev: Path, **environ: str):
    """A process that has the device node open, as one that computes on the GPU has."""
    node = str(dev / "nvidia0")  # O_PATH: there is no driver to open it otherwise
    code = f"import os, signal; os.open({node!r}, os.O_PATH); print(flush=True); signal.pause()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=environ, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def ended_owner() -> dict:
    """A saferun that has ended, as its run's journal names it."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as owner:
        start = procfs.start(owner.pid)
        owner.communicate(b"\n")
    return {**procfs.this_process(), "pid": owner.pid, "start": start}


def left_by(stand, by: dict, *, alive: int | None = None, run: str = "r1") -> dict[str, str]:
    """The environment of what a run started, and the run's journal, which says who ran it.

    `alive` is when the run last lived; None: after all that these tests start.
    """
    folder = stand.runs / run
    folder.mkdir(parents=True)
    event = {"at": 1, "event": "attempt", "attempt": 1, "by": by}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    last = procfs.now() + 1000 if alive is None else alive
    (folder / "alive").write_text(f"{last:020d}\n")
    locks = f"{by['pid']}:{by['start']}:{A}"
    return {"SAFERUN_INJECT": contract(run), "SAFERUN_LOCKS": locks}


def contract(run: str, **more) -> str:
    known = {"v": 1, "run": run, "attempt": 1, "hooks": {}, "mitigations": []}
    return json.dumps({**known, **more})


# Leftovers


def test_what_an_ended_run_left_on_a_gpu_is_ended(stand):
    stand.smi.reports(card())
    with holder(stand.dev, **left_by(stand, ended_owner())) as process:
        done = stand.recover(LEFTOVERS)
        assert process.wait(300) == -9
    assert done.acted
    (finding,) = done.findings
    assert finding.level == OK
    assert str(process.pid) in finding.what


def test_what_only_nvidia_smi_says_is_on_a_gpu_is_not_ended(stand):
    """Another user's argv[0] can forge its answer; the open device node cannot be forged."""
    with holder(stand.dev, **left_by(stand, ended_owner())) as process:
        elsewhere = stand.world._replace(dev="/nowhere")
        stand.smi.reports(card(holders=[process.pid]))
        assert not stand.recover(LEFTOVERS, world=elsewhere).acted
        assert process.poll() is None


def test_a_gpu_that_only_nvidia_smi_knows_is_not_reset(stand):
    stand.smi.reports(card(uuid="GPU-" + "9" * 8, action="Reset"))
    gpu = Gpu(0, "GPU-" + "9" * 8, "NVIDIA Fake")
    terms = recovery.ResetTerms("when-idle", lambda: True, [gpu.uuid])
    done = recovery.recover(
        recovery.Scope((gpu,), stand.environ), [RESET], terms, world=stand.world
    )
    assert "the kernel's driver does not name it" in done.findings[0].what
    assert not stand.was_reset


def test_two_answers_for_one_gpu_are_refused(stand):
    stand.smi.reports(card(action="None"), card(action="Reset"))
    done = stand.reset(suspects=())
    assert "a GPU is there twice" in done.findings[0].what
    assert not stand.was_reset


def test_a_driver_that_does_not_know_every_field_is_asked_for_the_others(stand):
    stand.smi.reports(card(used="70000"))
    state = (stand.smi.folder / "report").read_text().rpartition(",")[0]
    stand.smi.behaves(
        'case "$1" in *gpu_recovery_action*) echo "Field \\"x\\" is not a valid field to query."\n'
        f"exit 2 ;; --query-gpu*) echo {state!r} ;; esac"
    )
    (finding,) = stand.recover(DRAIN).findings
    assert "70000 MiB are still used" in finding.what


def test_the_journal_of_another_directory_is_found_by_its_receipts(stand):
    stand.smi.reports(card())
    environ = left_by(stand, ended_owner())
    environ["SAFERUN_INJECT"] = contract("r1", receipts=str(stand.runs / "r1" / "receipts"))
    stand.runs = Path("/nowhere")
    with holder(stand.dev, **environ) as process:
        assert stand.recover(LEFTOVERS).acted
        assert process.wait(300) == -9


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def nested(stand) -> dict[str, str]:
    environ = left_by(stand, ended_owner())
    outer = f"{os.getpid()}:{procfs.start(os.getpid())}:{A}"
    return {**environ, "SAFERUN_LOCKS": f"{outer};{environ['SAFERUN_LOCKS']}"}


def of(by=None, **changed):
    return lambda stand: left_by(stand, {**(by or ended_owner)(), **changed})


FOREIGN = {
    "not saferun's": lambda stand: {},
    "its saferun lives": of(procfs.this_process),
    "the outer saferun lives": nested,
    "an owner that its journal does not know": lambda stand: {
        **left_by(stand, ended_owner()),
        "SAFERUN_LOCKS": f"999999:1:{A}",
    },
    "unreadable owner": lambda stand: {**left_by(stand, ended_owner()), "SAFERUN_LOCKS": "what:x"},
    "its run was on another machine": of(boot="another", host="elsewhere"),
    "its run was before a restart": of(boot="another"),
    "its run was in another pid namespace": of(pids="pid:[1]"),
    "it began after the run had ended": lambda stand: left_by(stand, ended_owner(), alive=1),
    "nobody knows when its run ended": lambda stand: left_by(stand, ended_owner(), alive=0),
    "its run left no journal": lambda stand: {"SAFERUN_INJECT": contract("r2")},
    "only locks name its saferun": lambda stand: without(
        left_by(stand, ended_owner()), "SAFERUN_INJECT"
    ),
    "a run's name that leads elsewhere": lambda stand: {
        **left_by(stand, ended_owner()),
        "SAFERUN_INJECT": contract("../runs/r1"),
    },
    "garbage": lambda stand: {"SAFERUN_INJECT": "{"},
    "an environment that is cut": lambda stand: {
        **left_by(stand, ended_owner()),
        **{f"X{n}": "x" * 100_000 for n in range(11)},
    },
}


@pytest.mark.parametrize("environ", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_certain_to_be_a_leftover_lives(stand, environ):
    stand.smi.reports(card())
    with holder(stand.dev, **environ(stand)) as process:
        done = stand.recover(LEFTOVERS)
        assert process.poll() is None
    assert done == recovery.Recovered((), acted=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_s_process_is_never_ours(stand):
    script = "import os, sys; os.setuid(65534); print(flush=True); input()"
    environ = left_by(stand, ended_owner())
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        begun = procfs.start(process.pid)
        assert not orphans.is_leftover(process.pid, begun, str(stand.runs))
        process.communicate(b"\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_an_owner_that_hidepid_hides_is_alive(stand):
    """What /proc does not show may live: only the kernel's ESRCH says that it is gone."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(["sleep", "60"]) as owner:
        code = [sys.executable, "-c", source("gpu/ask_behind_hidepid"), str(owner.pid)]
        done = subprocess.run(code, env=environ, capture_output=True, text=True)
        owner.kill()
    if "no mount" in done.stdout:
        pytest.skip("this sandbox does not allow it")
    assert done.stdout == "None True False\n", done.stderr


def test_a_run_notes_when_it_lived_last(stand):
    journal = writer.Journal.begin(str(stand.runs), "r1", redact.Masker({}, ()), say=print)
    before = procfs.now()
    journal.event(RunEnded(0, ""))
    noted = int((stand.runs / "r1" / "alive").read_text())
    assert before <= noted <= procfs.now()
    journal.alive()
    assert int((stand.runs / "r1" / "alive").read_text()) >= noted
    journal.close()


# Memory


def test_memory_that_is_given_back_is_waited_for(stand):
    stand.smi.reports(card(used="70000"), look=0)
    stand.smi.reports(card(used="3"))
    done = stand.recover(DRAIN, drain_s=20)
    assert done == recovery.Recovered((), acted=True)
    assert stand.smi.asked == [*LOOK, *LOOK]


def test_memory_that_a_foreign_process_holds_is_said_with_its_pid(stand):
    stand.smi.reports(card(used="70000", holders=[999999]))
    (finding,) = stand.recover(DRAIN).findings
    assert finding.level == PROBLEM
    assert finding.area == "GPU 0"
    assert "70000 MiB are still used" in finding.what
    assert "pid 999999 (ended)" in finding.what


def test_memory_that_nobody_seems_to_hold_is_said(stand):
    stand.smi.reports(card(used="70000"))
    (finding,) = stand.recover(DRAIN).findings
    assert "no process is seen" in finding.fix


# Caches, persistence


def aged(path: Path) -> Path:
    path.mkdir(mode=0o700)
    old = time.time() - 2 * orphans.CACHE_AGE_S
    os.utime(path, (old, old))
    return path


def test_only_caches_that_no_run_has_are_removed(stand):
    place = stand.dev.parent
    old, used = aged(place / "saferun-cache-old"), aged(place / "saferun-cache-used")
    user_s, fresh = aged(place / "torchinductor_me"), place / "saferun-cache-fresh"
    fresh.mkdir(mode=0o700)
    remedies = Probes(stand.environ, None)
    held = Path(remedies.ask(["fresh-directory"], 1)["fresh-directory"])
    os.utime(held, (0, 0))
    stand.smi.reports(card())
    with holder(stand.dev, TORCHINDUCTOR_CACHE_DIR=str(used)):
        (finding,) = stand.recover(recovery.CACHES).findings
    assert finding.detail == str(old)
    assert [p.exists() for p in (old, used, user_s, fresh, held)] == [False, *[True] * 4]
    remedies.close()
    assert not held.exists()


def test_a_driver_that_forgets_its_gpus_is_noted(stand):
    stand.smi.reports(card(persistence="Disabled"))
    (finding,) = stand.recover(recovery.PERSISTENCE).findings
    assert finding.level == NOTE
    assert "nvidia-persistenced" in finding.fix


# Reset


def test_an_idle_gpu_is_reset_as_root_under_the_lock(stand):
    stand.smi.reports(card())
    done = stand.reset()
    assert stand.smi.asked == [*LOOK, f"--gpu-reset -i {A}"]
    assert done.acted
    assert done.findings[0].level == OK


@pytest.mark.parametrize("action", ["Reset", "Drain and Reset", "GPU Reset"])
def test_the_driver_s_own_wish_is_a_reason(stand, action):
    stand.smi.reports(card(action=action))
    assert stand.reset(suspects=()).acted
    assert stand.was_reset


@pytest.mark.parametrize("action", ["None", "Drain P2P", "N/A", "Bus Reset"])
def test_without_a_reason_nothing_is_reset(stand, action):
    stand.smi.reports(card(action=action))
    assert stand.reset(suspects=()) == recovery.Recovered((), acted=False)
    assert not stand.was_reset


def test_a_driver_that_wants_a_reboot_gets_no_reset(stand):
    stand.smi.reports(card(action="Reboot"))
    (finding,) = stand.reset().findings
    assert finding.fix == "restart the machine"
    assert not stand.was_reset


NOT_NOW = {
    "the profile says never": ({"policy": "never"}, {}, "gpu_reset is never"),
    "not root": ({"root": False}, {}, "root"),
    "in a container": ({"sees_all": False}, {}, "cannot be seen"),
    "the lock is shared": ({"alone": lambda: False}, {}, "lock"),
    "MIG": ({}, {"mig": "Enabled"}, "MIG"),
    "MIG from the next reset on": ({}, {"pending": "Enabled"}, "come back in MIG mode"),
    "a process on it": ({}, {"holders": [999999]}, "pid 999999 (ended)"),
}


@pytest.mark.parametrize(("options", "reported", "why"), NOT_NOW.values(), ids=NOT_NOW)
def test_otherwise_an_administrator_is_told_what_to_do(stand, options, reported, why):
    stand.smi.reports(card(**reported))
    place = {key: options[key] for key in ("root", "sees_all") if key in options}
    rest = {key: value for key, value in options.items() if key not in place}
    done = stand.reset(world=stand.world._replace(**place), **rest)
    (finding,) = done.findings
    assert not stand.was_reset
    assert not done.acted
    assert why in finding.what
    assert f"nvidia-smi --gpu-reset -i {A}" in finding.fix


def test_a_gpu_that_somebody_has_open_is_not_reset(stand):
    stand.smi.reports(card())
    with holder(stand.dev) as process:
        (finding,) = stand.reset().findings
    assert f"pid {process.pid}" in finding.what
    assert not stand.was_reset


@pytest.mark.skipif(os.geteuid() != 0, reason="device nodes are made by root")
def test_a_gpu_that_a_container_has_open_under_another_name_is_not_reset(stand):
    stand.smi.reports(card())
    node = stand.dev / "accelerator5"
    os.mknod(node, 0o20600, os.makedev(orphans.NVIDIA_MAJOR, 0))
    held = os.open(node, os.O_PATH)  # there is no driver to open it otherwise
    try:
        (finding,) = stand.reset().findings
    finally:
        os.close(held)
    assert f"in use by pid {os.getpid()}" in finding.what
    assert not stand.was_reset


def test_a_process_that_comes_while_memory_is_waited_for_keeps_the_reset_away(stand):
    stand.smi.reports(card(), look=0)
    stand.smi.reports(card(holders=[999999]))
    terms = recovery.ResetTerms("when-idle", lambda: True, [A])
    done = stand.recover(DRAIN, RESET, terms=terms)
    assert "in use by pid 999999 (ended)" in done.findings[0].what
    assert not stand.was_reset


def test_the_lock_is_asked_last_of_all(stand):
    """It says who runs on the GPU at that moment; everything else has been looked at before."""
    asked: list[bool] = []

    def alone():
        asked.append(stand.was_reset)
        return True

    for reported in ({"holders": [999999]}, {"mig": "Enabled"}):
        stand.smi.reports(card(**reported))
        stand.reset(alone=alone)
    assert asked == []
    stand.smi.reports(card())
    stand.reset(alone=alone)
    assert asked == [False]
    assert stand.was_reset


HIDDEN = {
    "another pid namespace": ("unshare", "--pid", "--fork", "--mount-proc"),
    "another user namespace": ("unshare", "--user", "--map-root-user"),
    "no right to look": ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces and rights are root's to change")
@pytest.mark.parametrize("wrapper", HIDDEN.values(), ids=HIDDEN)
def test_where_processes_may_hide_nobody_claims_to_see_them(wrapper):
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("this sandbox does not allow it")
    code = "from saferun.gpu import recovery as recover; print(recover.here()[:2])"
    done = subprocess.run([*wrapper, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(True, False)", done.stderr


def test_a_pid_that_has_become_another_process_is_not_ended(dev):
    with holder(dev) as process:
        begun = procfs.start(process.pid)
        assert orphans.end({process.pid: begun - 1}, 1) == (0, [])
        assert procfs.start(process.pid) == begun
        assert orphans.end({process.pid: begun}, 5) == (1, [])


def test_a_mig_instance_is_never_reset(stand):
    stand.smi.reports(card(uuid="MIG-1", action="Reset"))
    gpu = Gpu(None, "MIG-1", "")
    terms = recovery.ResetTerms("when-idle", lambda: True, ["MIG-1"])
    recovery.recover(recovery.Scope((gpu,), stand.environ), [RESET], terms, world=stand.world)
    assert not stand.was_reset


def test_a_reset_that_fails_is_said_with_its_reason(stand):
    stand.smi.reports(card())
    (stand.smi.folder / "--gpu-reset.status").write_text("15")
    done = stand.reset()
    assert not done.acted
    assert done.findings[0].what == "its reset failed: exit status 15"


# Whatever nvidia-smi does


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sleep 600", "echo rubbish", "exit 9", "yes", "kill -9 $$"])
def test_an_nvidia_smi_that_hangs_or_lies_is_said_and_nothing_is_done(stand, script):
    stand.smi.behaves(script)
    world = stand.world._replace(smi_s=0.5)
    terms = recovery.ResetTerms("when-idle", lambda: True, [A])
    done = stand.recover(*recovery.EVERYTHING, terms=terms, world=world)
    assert done.findings[0].area == "nvidia-smi"
    assert not done.acted
    assert not stand.was_reset


def test_without_nvidia_smi_it_is_said(stand):
    stand.environ["PATH"] = "/nowhere"
    (finding,) = stand.recover(DRAIN).findings
    assert finding.what == "nvidia-smi is not on PATH"


# In a run, and on its own

FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.00 GiB is free. Process 4711 has 76.00 GiB memory in use. Of the allocated memory "
    "1.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda"))


def test_the_kinds_that_ask_for_recovery_are_kinds():
    assert set(AFTER) <= set(load_failures({}).kinds)


@pytest.mark.skipif(os.geteuid() != 0, reason="device nodes are made by root")
def test_a_leftover_that_fills_the_gpu_is_ended_before_the_next_attempt(machine, tmp_path):
    (tmp_path / "job.py").write_text(
        "import os, sys\n"
        "class OutOfMemoryError(RuntimeError): __module__ = 'torch'\n"
        f"if os.environ['SAFERUN_ATTEMPT'] == '1': raise OutOfMemoryError({FULL!r})\n"
        "print('done')\n"
    )
    (tmp_path / "dev").mkdir()
    number = os.makedev(orphans.NVIDIA_MAJOR, 77)  # other tests, at the same time, look at 0 and 1
    os.mknod(tmp_path / "dev" / "nvidia0", 0o20600, number)
    stand = SimpleNamespace(runs=tmp_path / "other runs")
    environ = left_by(stand, ended_owner())
    environ["SAFERUN_INJECT"] = contract("r1", receipts=str(stand.runs / "r1" / "receipts"))
    with holder(tmp_path / "dev", **environ) as process:
        machine.smi.reports(card(0, holders=[process.pid], used="77000"), look=0)
        machine.smi.reports(card(0), card(1))
        options = ["--set", "launcher=python", "--set", "retry.backoff_s=[0, 0]"]
        ran = machine.run("--profile", "h100", *options, "job.py")
        assert process.wait(300) == -9
    assert (ran.status, ran.out) == (0, "done\n"), ran.err
    assert any("ended what an earlier run had left on the GPUs" in line for line in ran.messages)
    assert [f["level"] for event in ran.events("recovery") for f in event["findings"]] == [OK]


@pytest.mark.parametrize(
    ("failure", "trials"),
    [("raise OutOfMemoryError(text)", 2), ("os.kill(os.getpid(), 9)", 1)],
    ids=["a full GPU", "killed"],
)
def test_gpus_are_tried_again_after_a_failure_that_may_be_theirs(
    machine, tmp_path, failure, trials
):
    (tmp_path / "job.py").write_text(
        "import os\n"
        "class OutOfMemoryError(RuntimeError): __module__ = 'torch'\n"
        f"text = {FULL!r}\n"
        f"if os.environ['SAFERUN_ATTEMPT'] == '1': {failure}\n"
    )
    options = ["--set", "launcher=python", "--set", "retry.backoff_s=[0, 0]"]
    options += ["--set", "preflight.mode=require"]
    ran = machine.run("--profile", "h100", *options, "job.py")
    assert ran.status == 0, ran.err
    assert [event["granted"] for event in ran.events("preflight")] == [True] * trials


@pytest.fixture
def machine(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """One whose locks are its own, since the UUIDs are the same in all tests."""
    monkeypatch.setattr(lock_dir, "_directories", lambda environ: [str(tmp_path / "locks")])
    return Machine(tmp_path, library)


def on_its_own(machine, **behaviour):
    facts = GpuFacts((GPU,), "proc")
    environ = {**machine.environ, "FAKE_CUDA_GPUS": "1", **behaviour}
    return preflight_gate.recover_cuda_context(environ, facts, reset="when-idle", runs="")


def test_recovery_on_its_own_says_that_there_is_nothing_to_do(machine):
    machine.smi.reports(card())
    assert {finding.level for finding in on_its_own(machine)} == {OK}


def test_recovery_on_its_own_names_the_gpu_that_stays_bad(machine):
    machine.smi.reports(card(mig="Enabled"))
    found = on_its_own(machine, FAKE_CUDA_BAD="0:copy:719")
    assert any("which is not saferun's to do here" in finding.what for finding in found)
    assert any("CUDA_ERROR_LAUNCH_FAILED (719)" in finding.what for finding in found)
    assert not any("--gpu-reset" in argv for argv in machine.smi.asked)


def test_recovery_leaves_gpus_alone_that_another_run_has(machine, tmp_path):
    on_its_own(machine)  # makes the directory
    before = machine.smi.asked
    with (tmp_path / "locks" / f"{A}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = on_its_own(machine)
    assert [finding.area for finding in found] == ["locks"]
    assert machine.smi.asked == before
