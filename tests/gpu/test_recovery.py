"""Bringing GPUs back: memory, caches, the reset and all that forbids it; never a real GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_nvml import gpu
from recovery_stand import A, holder

from saferun.gpu import orphans, recovery
from saferun.gpu.cuda_errors import DRAIN, RESET
from saferun.gpu.nvml import LIBRARY
from saferun.model import NOTE, OK, PROBLEM, Gpu
from saferun.supervise.changes.probes import Probes

WANTED = {"value.230": "1"}  # NVML_GPU_RECOVERY_ACTION_GPU_RESET


def test_a_gpu_that_only_nvml_knows_is_not_reset(stand):
    stand.nvml.reports(gpu(GetUUID="GPU-" + "9" * 8, **WANTED))
    done = stand.reset(gpus=[Gpu(0, "GPU-" + "9" * 8, "NVIDIA Fake")])
    assert "the kernel's driver does not name it" in done.findings[0].what
    assert not stand.was_reset


def test_a_driver_that_does_not_know_every_field_is_asked_for_the_others(stand):
    old = {name: text for name, text in gpu(used=70000).items() if not name.startswith("value.")}
    stand.nvml.reports(old)
    (finding,) = stand.recover(DRAIN).findings
    assert "70000 MiB are still used" in finding.what


# Memory


def test_memory_that_is_given_back_is_waited_for(stand):
    stand.nvml.reports(gpu(used=70000), look=0)
    stand.nvml.reports(gpu(used=3))
    done = stand.recover(DRAIN, drain_s=20)
    assert done == recovery.Recovered((), acted=True)
    assert stand.nvml.asked == 2


def test_memory_that_a_foreign_process_holds_is_said_with_its_pid(stand):
    stand.nvml.reports(gpu(used=70000, holders=[999999]))
    (finding,) = stand.recover(DRAIN).findings
    assert finding.level == PROBLEM
    assert finding.area == "GPU 0"
    assert "70000 MiB are still used" in finding.what
    assert "pid 999999 (ended)" in finding.what


def test_memory_that_nobody_seems_to_hold_is_said(stand):
    stand.nvml.reports(gpu(used=70000))
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
    stand.nvml.reports(gpu())
    with holder(stand.dev, TORCHINDUCTOR_CACHE_DIR=str(used)):
        (finding,) = stand.recover(recovery.CACHES).findings
    assert finding.detail == str(old)
    assert [p.exists() for p in (old, used, user_s, fresh, held)] == [False, *[True] * 4]
    remedies.close()
    assert not held.exists()


def test_a_driver_that_forgets_its_gpus_is_noted(stand):
    stand.nvml.reports(gpu(GetPersistenceMode="0"))
    (finding,) = stand.recover(recovery.PERSISTENCE).findings
    assert finding.level == NOTE
    assert "nvidia-persistenced" in finding.fix


# Reset


def test_an_idle_gpu_is_reset_as_root_under_the_lock(stand):
    stand.nvml.reports(gpu())
    done = stand.reset()
    assert (stand.nvml.asked, stand.smi.asked) == (1, [f"--gpu-reset -i {A}"])
    assert done.acted
    assert done.findings[0].level == OK


@pytest.mark.parametrize("action", ["1", "4"], ids=["reset", "drain and reset"])
def test_the_driver_s_own_wish_is_a_reason(stand, action):
    stand.nvml.reports(gpu(**{"value.230": action}))
    assert stand.reset(suspects=()).acted
    assert stand.was_reset


ACTIONS = {"none": "0", "drain P2P": "3", "not supported": "!3", "bus reset": "6", "new": "99"}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_without_a_reason_nothing_is_reset(stand, action):
    stand.nvml.reports(gpu(**{"value.230": action}))
    assert stand.reset(suspects=()) == recovery.Recovered((), acted=False)
    assert not stand.was_reset


def test_a_driver_that_wants_a_reboot_gets_no_reset(stand):
    stand.nvml.reports(gpu(**{"value.230": "2"}))
    (finding,) = stand.reset().findings
    assert finding.fix == "restart the machine"
    assert not stand.was_reset


NOT_NOW = {
    "the profile says never": ({"policy": "never"}, {}, "gpu_reset is never"),
    "not root": ({"root": False}, {}, "root"),
    "in a container": ({"sees_all": False}, {}, "cannot be seen"),
    "the lock is shared": ({"alone": lambda: False}, {}, "lock"),
    "MIG": ({}, {"GetMigMode": "1 1"}, "MIG"),
    "MIG from the next reset on": ({}, {"GetMigMode": "0 1"}, "come back in MIG mode"),
    "a process on it": ({}, {"holders": [999999]}, "pid 999999 (ended)"),
}


@pytest.mark.parametrize(("options", "reported", "why"), NOT_NOW.values(), ids=NOT_NOW)
def test_otherwise_an_administrator_is_told_what_to_do(stand, options, reported, why):
    stand.nvml.reports(gpu(**reported))
    place = {key: options[key] for key in ("root", "sees_all") if key in options}
    rest = {key: value for key, value in options.items() if key not in place}
    done = stand.reset(world=stand.world._replace(**place), **rest)
    (finding,) = done.findings
    assert not stand.was_reset
    assert not done.acted
    assert why in finding.what
    assert f"nvidia-smi --gpu-reset -i {A}" in finding.fix


def test_a_gpu_that_somebody_has_open_is_not_reset(stand):
    stand.nvml.reports(gpu())
    with holder(stand.dev) as process:
        (finding,) = stand.reset().findings
    assert f"pid {process.pid}" in finding.what
    assert not stand.was_reset


@pytest.mark.skipif(os.geteuid() != 0, reason="device nodes are made by root")
def test_a_gpu_that_a_container_has_open_under_another_name_is_not_reset(stand):
    stand.nvml.reports(gpu())
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
    stand.nvml.reports(gpu(), look=0)
    stand.nvml.reports(gpu(holders=[999999]))
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

    for reported in ({"holders": [999999]}, {"GetMigMode": "1 1"}):
        stand.nvml.reports(gpu(**reported))
        stand.reset(alone=alone)
    assert asked == []
    stand.nvml.reports(gpu())
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


def test_a_mig_instance_is_never_reset(stand):
    stand.nvml.reports(gpu(GetUUID="MIG-1", **WANTED))
    stand.reset(gpus=[Gpu(None, "MIG-1", "")])
    assert not stand.was_reset


def test_a_reset_that_fails_is_said_with_its_reason(stand):
    stand.nvml.reports(gpu())
    (stand.smi.folder / "--gpu-reset.status").write_text("15")
    done = stand.reset()
    assert not done.acted
    assert done.findings[0].what == "its reset failed: exit status 15"


# Whatever NVML does


@pytest.mark.parametrize("behaviour", ["hang", "crash", "!9", "!18"])
def test_an_nvml_that_hangs_or_fails_is_said_and_nothing_is_done(stand, behaviour):
    stand.nvml.reports(gpu(), Init_v2=behaviour)
    world = stand.world._replace(nvml_s=1.0)
    terms = recovery.ResetTerms("when-idle", lambda: True, [A])
    done = stand.recover(*recovery.EVERYTHING, terms=terms, world=world)
    assert done.findings[0].area == "NVML"
    assert not done.acted
    assert not stand.was_reset


def test_without_nvml_it_is_said(stand):
    (stand.nvml.folder / LIBRARY).unlink()
    (stand.nvml.folder / LIBRARY).touch()  # no library: that of the machine is not looked for
    (finding,) = stand.recover(DRAIN).findings
    assert finding.what == "libnvidia-ml.so.1 cannot be loaded"


def test_without_nvidia_smi_nothing_is_reset_and_it_is_said(stand):
    stand.nvml.reports(gpu())
    stand.environ["PATH"] = "/nowhere"
    done = stand.reset()
    assert not done.acted
    assert done.findings[0].what == "its reset failed: nvidia-smi is not on PATH"
