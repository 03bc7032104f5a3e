"""Bringing GPUs back: memory, caches, the reset and all that forbids it; never a real GPU."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import gpu
from fakecuda import MINOR
from helpers import NO_PID
from recovery_host import A, holder
from rights import needs

from saferun.gpu import orphans, recovery
from saferun.gpu.cuda_errors import DRAIN, RESET
from saferun.gpu.nvml import LIBRARY
from saferun.model import NOTE, OK, PROBLEM, Gpu
from saferun.supervise.changes.probes import Probes

# Memory


def test_memory_that_is_given_back_is_waited_for(host):
    host.nvml.reports(gpu(used=70000), look=0)
    host.nvml.reports(gpu(used=3))
    done = host.recover(DRAIN, drain_s=20)
    assert done == recovery.Recovered((), acted=True)
    assert host.nvml.asked == 2


@pytest.mark.parametrize(
    ("holders", "said"),
    [([NO_PID], f"by pid {NO_PID} (ended)"), ([], "no process is seen")],
    ids=["a foreign process", "nobody"],
)
def test_memory_that_stays_is_said_with_who_holds_it_whatever_the_driver_knows(host, holders, said):
    known = gpu(used=70000, holders=holders)
    old = {name: text for name, text in known.items() if not name.startswith("value.")}
    host.nvml.reports(old)
    (finding,) = host.recover(DRAIN).findings
    assert (finding.level, finding.area) == (PROBLEM, "GPU 0")
    assert "70000 MiB are still used" in finding.what
    assert said in finding.what + finding.fix


# Caches, persistence


def aged(path: Path) -> Path:
    path.mkdir(mode=0o700)
    old = time.time() - 2 * orphans.CACHE_AGE_S
    os.utime(path, (old, old))
    return path


def test_only_caches_that_no_run_has_are_removed(host):
    place = host.dev.parent
    old, used = aged(place / "saferun-cache-old"), aged(place / "saferun-cache-used")
    user_s, fresh = aged(place / "torchinductor_me"), place / "saferun-cache-fresh"
    fresh.mkdir(mode=0o700)
    remedies = Probes(host.environ, None)
    held = Path(remedies.ask(["fresh-directory"], 1)["fresh-directory"])
    os.utime(held, (0, 0))
    host.nvml.reports(gpu())
    with holder(host.dev, TORCHINDUCTOR_CACHE_DIR=str(used)):
        (finding,) = host.recover(recovery.CACHES).findings
    assert finding.detail == str(old)
    assert [p.exists() for p in (old, used, user_s, fresh, held)] == [False, *[True] * 4]
    remedies.close()
    assert not held.exists()


def test_a_driver_that_forgets_its_gpus_is_noted(host):
    host.nvml.reports(gpu(GetPersistenceMode="0"))
    (finding,) = host.recover(recovery.PERSISTENCE).findings
    assert finding.level == NOTE
    assert "nvidia-persistenced" in finding.fix


# Reset


@pytest.mark.parametrize(
    ("reported", "suspects"),
    [
        ({}, (A,)),
        ({"value.230": "1"}, ()),  # NVML_GPU_RECOVERY_ACTION_GPU_RESET
        ({"value.230": "4"}, ()),  # drain and reset
    ],
    ids=["its test failed", "its driver asks", "drain and reset"],
)
def test_an_idle_gpu_that_needs_it_is_reset_as_root_when_its_lock_is_ours(host, reported, suspects):
    asked: list[bool] = []

    def alone():  # who runs on the GPU at that moment; it is asked last of all
        asked.append(host.was_reset)
        return True

    host.nvml.reports(gpu(holders=[NO_PID], **reported))
    host.reset(suspects=suspects, alone=alone)
    assert asked == []
    host.nvml.reports(gpu(**reported))
    done = host.reset(suspects=suspects, alone=alone)
    assert (asked, host.smi.asked) == ([False], [f"--gpu-reset -i {A}"])
    assert (done.acted, done.findings[0].level) == (True, OK)


ACTIONS = {"none": "0", "drain P2P": "3", "not supported": "!3", "new": "99", "reboot": "2"}


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_without_a_reason_nothing_is_reset(host, action):
    host.nvml.reports(gpu(**{"value.230": action}))
    done = host.reset(suspects=())
    assert [finding.fix for finding in done.findings] == ["restart the machine"] * (action == "2")
    assert not host.was_reset


@pytest.mark.parametrize("how", ["it fails", "no nvidia-smi"])
def test_a_reset_that_fails_is_said_with_its_reason(host, how):
    host.nvml.reports(gpu())
    (host.smi.folder / "--gpu-reset.status").write_text("15", encoding="utf-8")
    host.environ["PATH"] = host.environ["PATH"] if how == "it fails" else "/nowhere"
    done = host.reset()
    why = "exit status 15" if how == "it fails" else "nvidia-smi is not on PATH"
    assert (done.acted, done.findings[0].what) == (False, f"its reset failed: {why}")


NOT_NOW = {
    "the profile says never": ({"policy": "never"}, {}, "gpu_reset is never"),
    "not root": ({"root": False}, {}, "root"),
    "in a container": ({"sees_all": False}, {}, "cannot be seen"),
    "the lock is shared": ({"alone": lambda: False}, {}, "lock"),
    "MIG": ({}, {"GetMigMode": "1 1"}, "MIG"),
    "MIG from the next reset on": ({}, {"GetMigMode": "0 1"}, "come back in MIG mode"),
    "a process on it": ({}, {"holders": [NO_PID]}, f"pid {NO_PID} (ended)"),
    "only NVML knows it": (
        {"gpus": [Gpu(0, "GPU-9", "NVIDIA Fake")]},
        {"GetUUID": "GPU-9"},
        "the kernel's driver does not name it",
    ),
    "a MIG instance": ({"gpus": [Gpu(None, "MIG-1", "")]}, {"GetUUID": "MIG-1"}, "MIG instance"),
}


@pytest.mark.parametrize(("options", "reported", "why"), NOT_NOW.values(), ids=NOT_NOW)
def test_otherwise_an_administrator_is_told_what_to_do(host, options, reported, why):
    host.nvml.reports(gpu(**reported))
    place = {key: options[key] for key in ("root", "sees_all") if key in options}
    rest = {key: value for key, value in options.items() if key not in place}
    done = host.reset(world=replace(host.world, **place), **rest)
    (finding,) = done.findings
    assert not host.was_reset
    assert not done.acted
    assert why in finding.what
    assert (
        f"nvidia-smi --gpu-reset -i {options.get('gpus', [Gpu(0, A, '')])[0].uuid}" in finding.fix
    )


@needs("make devices")
def test_a_gpu_that_a_container_has_open_under_another_name_is_not_reset(host):
    host.nvml.reports(gpu())
    node = host.dev / "accelerator5"
    os.mknod(node, 0o20600, os.makedev(orphans.NVIDIA_MAJOR, MINOR))
    held = os.open(node, os.O_PATH)  # there is no driver to open it otherwise
    try:
        (finding,) = host.reset().findings
    finally:
        os.close(held)
    assert f"in use by pid {os.getpid()}" in finding.what
    assert not host.was_reset


def test_a_process_that_comes_while_memory_is_waited_for_keeps_the_reset_away(host):
    host.nvml.reports(gpu(), look=0)
    host.nvml.reports(gpu(holders=[NO_PID]))
    terms = recovery.ResetTerms("when-idle", lambda: True, [A])
    done = host.recover(DRAIN, RESET, terms=terms)
    assert f"in use by pid {NO_PID} (ended)" in done.findings[0].what
    assert not host.was_reset


HIDDEN = {
    "another pid namespace": ("unshare", "--pid", "--fork", "--mount-proc"),
    "another user namespace": ("unshare", "--user", "--map-root-user"),
    "no right to look": ("setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"),
}


@needs("make namespaces")
@pytest.mark.parametrize("wrapper", HIDDEN.values(), ids=HIDDEN)
def test_where_processes_may_hide_nobody_claims_to_see_them(wrapper):
    code = (
        "from saferun.gpu import recovery; here = recovery.here(); print(here.root, here.sees_all)"
    )
    done = subprocess.run([*wrapper, sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "True False", done.stderr


# Whatever NVML does


@pytest.mark.parametrize("behaviour", ["hang", "crash", "!9", "no library"])
def test_an_nvml_that_hangs_or_fails_is_said_and_nothing_is_done(host, behaviour):
    host.nvml.reports(gpu(), **({} if behaviour == "no library" else {"Init_v2": behaviour}))
    if behaviour == "no library":
        (host.nvml.folder / LIBRARY).unlink()
        (host.nvml.folder / LIBRARY).touch()  # that of the machine is not looked for
    world = replace(host.world, nvml_s=1.0)
    terms = recovery.ResetTerms("when-idle", lambda: True, [A])
    done = host.recover(*recovery.EVERYTHING, terms=terms, world=world)
    assert done.findings[0].area == "NVML"
    assert not done.acted
    assert not host.was_reset
