"""What an ended run left on a GPU is ended, and nobody else: real processes and directories."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import gpu
from helpers import NO_PID
from recovery_host import A, contract, ended_owner, holder, left_by
from repo import source
from rights import needs

from saferun.base import proc
from saferun.gpu import orphans, recovery
from saferun.gpu.cuda_errors import LEFTOVERS
from saferun.model import OK
from saferun.system import procfs


def test_what_only_nvml_says_is_on_a_gpu_is_not_ended(host):
    """A pid may be another container's; the open device node is a process of this machine."""
    with holder(host.dev, **left_by(host.runs)) as process:
        elsewhere = replace(host.world, dev="/nowhere")
        host.nvml.reports(gpu(holders=[process.pid]))
        assert not host.recover(LEFTOVERS, world=elsewhere).acted
        assert process.poll() is None


@pytest.mark.parametrize("runs", ["as configured", "elsewhere"])
def test_what_an_ended_run_left_on_a_gpu_is_ended(host, runs):
    host.nvml.reports(gpu())
    environ = left_by(host.runs)
    if runs == "elsewhere":  # its journal is found by its receipts
        environ["SAFERUN_INJECT"] = contract("r1", receipts=str(host.runs / "r1" / "receipts"))
        host.runs = Path("/nowhere")
    with holder(host.dev, **environ) as process:
        done = host.recover(LEFTOVERS)
        assert process.wait(300) == -9
    (finding,) = done.findings
    assert (done.acted, finding.level, str(process.pid) in finding.what) == (True, OK, True)


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


def nested(host) -> dict[str, str]:
    environ = left_by(host.runs)
    outer = f"{os.getpid()}:{proc.start(os.getpid())}:{A}"
    return {**environ, "SAFERUN_LOCKS": f"{outer};{environ['SAFERUN_LOCKS']}"}


def of(by=ended_owner, **changed):
    return lambda host: left_by(host.runs, {**by(), **changed})


def beside(**more):
    return lambda host: {**left_by(host.runs), **more}


def kept_by_another_user(host) -> dict[str, str]:
    environ = left_by(host.runs)
    (host.runs / "r1").chmod(0o777)
    return environ


def swapped_for_a_link(host) -> dict[str, str]:
    environ = left_by(host.runs)
    (host.runs / "r1").rename(host.runs / "r0")
    (host.runs / "r1").symlink_to("r0")
    return environ


FOREIGN = {
    "others can write its journal": kept_by_another_user,
    "its journal is a link": swapped_for_a_link,
    "not saferun's": lambda host: {},
    "its saferun lives": of(procfs.this_process),
    "the outer saferun lives": nested,
    "an owner that its journal does not know": beside(SAFERUN_LOCKS=f"{NO_PID}:1:{A}"),
    "unreadable owner": beside(SAFERUN_LOCKS="what:x"),
    "its run was on another machine": of(boot="another", host="elsewhere"),
    "its run was before a restart": of(boot="another"),
    "its run was in another pid namespace": of(pids="pid:[1]"),
    "it began after the run had ended": lambda host: left_by(host.runs, alive=1),
    "nobody knows when its run ended": lambda host: left_by(host.runs, alive=0),
    "its run left no journal": lambda host: {"SAFERUN_INJECT": contract("r2")},
    "only locks name its saferun": lambda host: without(left_by(host.runs), "SAFERUN_INJECT"),
    "a run's name that leads elsewhere": beside(SAFERUN_INJECT=contract("../runs/r1")),
    "garbage": lambda host: {"SAFERUN_INJECT": "{"},
    "an environment that is cut": beside(**{f"X{n}": "x" * 100_000 for n in range(11)}),
}


@pytest.mark.parametrize("environ", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_certain_to_be_a_leftover_lives(host, environ):
    host.nvml.reports(gpu())
    with holder(host.dev, **environ(host)) as process:
        done = host.recover(LEFTOVERS)
        assert process.poll() is None
    assert done == recovery.Recovered((), acted=False)


@needs("become others")
def test_another_user_s_process_is_never_ours(host):
    script = "import os, sys; os.setuid(65534); print(flush=True); input()"
    environ = left_by(host.runs)
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        begun = proc.start(process.pid)
        assert not orphans.is_leftover(process.pid, begun, str(host.runs))
        process.communicate(b"\n")


@needs("become others", "make namespaces")
def test_an_owner_that_hidepid_hides_is_alive(host):
    """What /proc does not show may live: only the kernel's ESRCH says that it is gone."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(["sleep", "60"]) as owner:
        code = [sys.executable, "-c", source("gpu/ask_behind_hidepid"), str(owner.pid)]
        done = subprocess.run(code, env=environ, capture_output=True, text=True)
        owner.kill()
    assert done.stdout == "None True False\n", done.stderr


def test_a_pid_that_has_become_another_process_is_not_ended(dev):
    with holder(dev) as process:
        begun = proc.start(process.pid)
        assert orphans.end({process.pid: begun - 1}, 1) == (0, [])
        assert proc.start(process.pid) == begun
        assert orphans.end({process.pid: begun}, 5) == (1, [])
