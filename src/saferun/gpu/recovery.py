"""Bring GPUs back into use, the least invasive way first: `recover_cuda_context`.

    1. end processes that an ended saferun run has left on them, and no others (orphans.py)
    2. wait until released memory is free
    3. remove compile caches that ended saferun runs have left
    4. report if persistence mode would help
    5. reset a GPU: only with `recover.gpu_reset: when-idle`, as root, with the exclusive lock, with
       no process on it, never with MIG; otherwise report what an administrator can do

A reset needs a reason on that GPU: the driver asks for it (*GPU Recovery Action*,
https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/error-recovery-and-response-flags.html), or
its test failed in a way that a reset fixes (cuda_errors.py). NVML has no reset: nvidia-smi does it,
and checks again that nobody uses the GPU (https://docs.nvidia.com/deploy/nvidia-smi/index.html,
--gpu-reset). NVML's answers can only prevent an action; nothing is ended or reset without
confirmation from /proc.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from saferun.base import proc
from saferun.base.durations import seconds
from saferun.gpu import nvml, orphans
from saferun.gpu.cuda_errors import DRAIN, LEFTOVERS, RESET
from saferun.model import NOTE, OK, PROBLEM, Finding, Gpu
from saferun.system import command as bounded
from saferun.system import paths, procfs
from saferun.system.gpus import minors

CACHES, PERSISTENCE = "caches", "persistence"
EVERYTHING = frozenset({LEFTOVERS, DRAIN, CACHES, PERSISTENCE, RESET})
NVML_S = 5.0  # NVML's answer normally takes at most 2 s
DRAIN_S = 10.0  # the driver takes a second or two to notice the end of a killed process
RESET_S = 60.0  # a reset must not be interrupted needlessly
END_S = 3.0  # time for all leftover processes to die; normally milliseconds each
POLL_S = 0.5  # between two looks, each of which starts a process that asks NVML
IDLE_MIB = 1024  # used memory of a GPU without work: the driver's own, a display's
_ASKS_RESET = ("reset", "gpu reset", "drain and reset", "drain p2p and reset")
# PROC_PID_INIT_INO and PROC_USER_INIT_INO, include/linux/proc_ns.h
_INITIAL = {"pid": "pid:[4026531836]", "user": "user:[4026531837]"}
_CAP_SYS_PTRACE = 19  # shows other users' open files; capabilities(7)
_PERSISTENCE = "https://docs.nvidia.com/deploy/driver-persistence/index.html"


@dataclass(frozen=True, slots=True)
class Reach:
    """The rights of this process, and the places that it reads; tests replace them."""

    root: bool
    sees_all: bool  # all processes of this machine and their open files are visible
    dev: str = "/dev"
    driver: str = "/proc/driver/nvidia"
    nvml_s: float = NVML_S  # longest time for NVML
    sleep: Callable[[float], object] = time.sleep


@dataclass(frozen=True, slots=True)
class Recovered:
    """What was done, and the findings."""

    findings: tuple[Finding, ...]
    acted: bool  # something has changed: test the GPUs again


def here() -> Reach:
    """Return the rights of this process, and the places that it reads."""
    sees_all = all(proc.namespace("self", kind) == _INITIAL[kind] for kind in _INITIAL)
    granted = re.search(r"^CapEff:\s*([0-9a-f]+)$", proc.text("/proc/self/status"), re.M)
    sees_all &= bool(granted and int(granted[1], 16) >> _CAP_SYS_PTRACE & 1)
    return Reach(os.geteuid() == 0, sees_all)


@dataclass(frozen=True, slots=True)
class ResetTerms:
    """Whether GPUs may be reset, and which ones have a reason."""

    policy: str = "never"  # `recover.gpu_reset`: "never" or "when-idle"
    alone: Callable[[], bool] = lambda: False  # is nobody else on them? see lock.Held.alone
    suspects: Sequence[str] = ()  # UUIDs of GPUs whose test failed


def recover(
    gpus: Sequence[Gpu],
    asks: Iterable[str],
    environ: Mapping[str, str],
    *,
    runs: str = "",
    terms: ResetTerms = ResetTerms(),
    drain_s: float = DRAIN_S,
    world: Reach | None = None,
) -> Recovered:
    """Do the requested steps, least invasive first; the machine's answers raise nothing.

    Args:
        gpus: the job's GPUs.
        asks: requested steps, from LEFTOVERS, DRAIN, CACHES, PERSISTENCE, RESET.
        environ: the environment; PATH finds nvidia-smi, LD_LIBRARY_PATH NVML, TMPDIR the caches.
        runs: the directory of the runs' journals.
        terms: the conditions of a reset.
        drain_s: longest wait for memory to become free, in seconds.
        world: the rights of this process; None: determine them.
    """
    asks = frozenset(asks)
    work = _Recovery(gpus, environ, runs, world or here())
    found: list[Finding] = []
    if LEFTOVERS in asks:
        found += work.end_leftovers()
    if DRAIN in asks:
        found += work.drain(drain_s)
    if CACHES in asks:
        found += work.clear_caches()
    if PERSISTENCE in asks:
        found += work.persistence()
    if RESET in asks:
        found += work.reset_all(terms)
    return Recovered((*work.trouble(), *found), work.acted)


class _Recovery:
    """One recovery: the GPUs' last state from NVML, and what was done."""

    def __init__(
        self, gpus: Sequence[Gpu], environ: Mapping[str, str], runs: str, world: Reach
    ) -> None:
        self.acted = False
        self._gpus, self._environ, self._runs, self._world = gpus, environ, runs, world
        self._answer: nvml.NvmlAnswer | None = None

    # what NVML says

    def trouble(self) -> list[Finding]:
        """Report that NVML was asked and did not answer."""
        if not self._answer or not self._answer.trouble:
            return []
        fix = "without its answer nothing is waited for or reset; look at dmesg"
        return [Finding(PROBLEM, "NVML", self._answer.trouble, "", fix)]

    def _state(self, *, fresh: bool = False) -> nvml.NvmlAnswer:
        if self._answer is None or fresh:
            self._answer = nvml.ask(self._environ, self._world.nvml_s)
        return self._answer

    def _card(self, gpu: Gpu) -> nvml.Card | None:
        return self._state().report.card(gpu.uuid)

    def _holders(self, card: nvml.Card) -> dict[int, str]:
        """Return the processes on a GPU, by NVML and by the open device node."""
        minor = minors(self._world.driver).get(card.get("GPU UUID"))
        opened = orphans.openers(None if minor is None else [minor], self._world.dev)
        pids = sorted({*opened, *(process.pid for process in card.processes)})
        return {pid: f"pid {pid} ({procfs.comm(pid)})" for pid in pids}

    # leftovers and memory

    def end_leftovers(self) -> list[Finding]:
        """End the processes on any GPU that an ended saferun run has left."""
        known = orphans.openers(None, self._world.dev)
        runs = self._runs
        ours = {pid: s for pid, s in sorted(known.items()) if orphans.is_leftover(pid, s, runs)}
        if not ours:
            return []
        names = ", ".join(f"{pid} ({procfs.comm(pid)})" for pid in ours)
        ended, living = orphans.end(ours, END_S)
        self.acted |= bool(ended)
        self._answer = None
        if living:
            fix = "look at its state (ps -o stat,wchan) and at dmesg; mostly a reboot frees it"
            what = f"{', '.join(map(str, living))} of an ended run cannot be killed"
            return [Finding(PROBLEM, "leftovers", what, names, fix)]
        what = f"ended what an earlier run had left on the GPUs: {names}"
        return [Finding(OK, "leftovers", what)]

    def drain(self, limit_s: float) -> list[Finding]:
        """Wait, for a limited time, until only the driver's own memory is used."""
        end = time.monotonic() + limit_s
        waited = False
        while busy := [gpu for gpu in self._gpus if (c := self._card(gpu)) and not _idle(c)]:
            if time.monotonic() >= end or self._state().trouble:
                break
            waited = True
            self._world.sleep(min(POLL_S, max(0.0, end - time.monotonic())))
            self._state(fresh=True)
        self.acted |= waited and not busy
        return [self._full(gpu, limit_s) for gpu in busy]

    def _full(self, gpu: Gpu, limit_s: float) -> Finding:
        card = self._card(gpu)
        assert card is not None  # it was busy, so it exists
        used, holders = card.get("FB Memory Usage/Used"), self._holders(card)
        what = f"{used} MiB are still used after {seconds(limit_s)}"
        if holders:
            what += f", by {', '.join(holders.values())}"
            fix = "not a run of ours: wait for it, end it, or choose other GPUs"
        else:
            fix = "no process is seen: it may be in another container, or stuck in the driver"
        return Finding(PROBLEM, _area(gpu), what, gpu.uuid, fix)

    # caches, persistence

    def clear_caches(self) -> list[Finding]:
        """Remove the compile caches that saferun made for runs that have ended.

        A user's own cache is never touched: the mitigation for a broken one is a fresh directory.
        """
        folder = self._environ.get("TMPDIR") or "/tmp"  # noqa: S108 - ours by owner and name
        gone = orphans.remove_stale_caches(folder)
        if not gone:
            return []
        what = f"removed {len(gone)} compile caches that ended runs had left"
        return [Finding(OK, "caches", what, ", ".join(gone))]

    def persistence(self) -> list[Finding]:
        """Report GPUs whose state the driver unloads as soon as nobody uses them."""
        off = [
            gpu
            for gpu in self._gpus
            if (card := self._card(gpu)) and card.get("Persistence Mode") == "Disabled"
        ]
        if not off:
            return []
        what = f"persistence mode is off ({', '.join(map(_area, off))})"
        detail = f"every first use sets the GPU up anew, 1 to 3 s each; {_PERSISTENCE}"
        fix = "as root: `systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1`"
        return [Finding(NOTE, "driver", what, detail, fix)]

    # reset

    def reset_all(self, terms: ResetTerms) -> list[Finding]:
        """Reset the GPUs that have a reason for it and may be reset."""
        found: list[Finding] = []
        self._answer = None  # the steps above may have changed its answer
        for gpu in self._gpus:
            card = self._card(gpu)
            action = card.get("GPU Recovery Action") if card else ""
            if "reboot" in action.lower():
                fix = "restart the machine"
                found.append(Finding(PROBLEM, _area(gpu), f"its driver asks: {action}", "", fix))
            elif action.lower() in _ASKS_RESET or gpu.uuid in terms.suspects:
                found.append(self._reset(gpu, card, action, terms))
        return found

    def _reset(self, gpu: Gpu, card: nvml.Card | None, action: str, terms: ResetTerms) -> Finding:
        reason = f"the driver asks: {action}" if action else "its test failed"
        refusal = self._refusal(gpu, card, terms)
        if refusal:
            what = f"it needs a reset ({reason}), which is not saferun's to do here: {refusal}"
            fix = (
                f"as root, with nothing running on it: `nvidia-smi --gpu-reset -i {gpu.uuid}`; "
                "restart the machine if that fails"
            )
            return Finding(PROBLEM, _area(gpu), what, gpu.uuid, fix)
        answer = _reset_by_nvidia_smi(gpu.uuid, self._environ)
        self._answer = None
        output = " ".join((answer.out + " " + answer.err).split())[:300]
        if answer.trouble:
            fix = "restart the machine"
            return Finding(PROBLEM, _area(gpu), f"its reset failed: {answer.trouble}", output, fix)
        self.acted = True
        return Finding(OK, _area(gpu), f"it was reset ({reason})", output)

    def _refusal(self, gpu: Gpu, card: nvml.Card | None, terms: ResetTerms) -> str:
        """Return why a GPU must not be reset; "" if nothing prevents it."""
        if terms.policy != "when-idle":
            return "recover.gpu_reset is never"
        if not self._world.root:
            return "saferun does not run as root"
        if not self._world.sees_all:
            return "from in here (a container?) other processes on the GPU cannot be seen"
        if not gpu.uuid.startswith("GPU-"):
            return "it is a MIG instance, or its UUID is not known"
        if card is None:
            return "NVML does not show it"
        if gpu.uuid not in minors(self._world.driver):
            return "the kernel's driver does not name it"
        if card.get("MIG Mode/Current") == "Enabled":
            return "it is in MIG mode"
        if card.get("MIG Mode/Pending") == "Enabled":
            return "it would come back in MIG mode"
        if holders := self._holders(card):
            return f"in use by {', '.join(holders.values())}"
        return "" if terms.alone() else "its lock is not ours alone"


def _reset_by_nvidia_smi(uuid: str, environ: Mapping[str, str]) -> bounded.Answer:
    program = next(paths.on_path("nvidia-smi", environ), None)
    if program is None:
        return bounded.Answer("", "", None, "nvidia-smi is not on PATH")
    return bounded.run((program, "--gpu-reset", "-i", uuid), environ, RESET_S)


def _idle(card: nvml.Card) -> bool:
    used = card.number("FB Memory Usage/Used")
    return used is None or used <= IDLE_MIB


def _area(gpu: Gpu) -> str:
    return "GPU" if gpu.number is None else f"GPU {gpu.number}"
