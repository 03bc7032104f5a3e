"""Processes that take GPU locks, for the tests of gpu/lock."""

import contextlib
import json
import os
import select
import subprocess
import sys

import pytest
from helpers import DEADLINE_S
from repo import ROOT
from sandbox import Sandbox

from saferun.gpu.lock import gpu_locks, lock_owner
from saferun.model import Gpu
from saferun.settings import LockPolicy

A = "GPU-14e799be-cee2-7364-1ed2-56588c2c62e3"
B = "GPU-e533a614-68dd-10bf-5cbb-1d78bacbb601"
SLICE_1 = "MIG-c7384736-a75d-5afc-978f-d2f1294409fd"
SLICE_2 = "MIG-a28ad590-3fda-56dd-84fc-0a0b96edc58d"
CUT = {SLICE_1: A, SLICE_2: A}
PROGRAM = ROOT / "tests/programs/gpu/hold_locks.py"


class Run(Sandbox):
    """A process that has acquired, or is about to."""

    def __init__(self, folder, directory, uuids, mode, *, prefix=(), env=None, slots=1, **job):
        policy = {"gpus": mode, "wait_s": job.pop("wait_s", 0), "slots": slots}
        job = {"uid": 0, "first": "", "then": "", "parents": {}, "aloud": False, **job}
        job = {"command": "train.py", **job, "uuids": uuids, "policy": policy}
        super().__init__(folder, PYTHONPATH=os.pathsep.join(sys.path), **(env or {}))
        words = (*prefix, sys.executable, PROGRAM, json.dumps({**job, "directory": str(directory)}))
        # Else a second line hides from select in our own buffer.
        self.process = self.popen(*words, stdin=subprocess.PIPE, stderr=None, bufsize=0)
        self.pid = self.process.pid

    def answer(self):
        """What it says next, within the deadline."""
        assert select.select([self.process.stdout], [], [], DEADLINE_S)[0], "no answer"
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        return self.process.wait(DEADLINE_S)

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)


def no_wait(seconds):
    raise AssertionError(f"slept {seconds} s")


def take(directory, *uuids, mode="refuse", wait_s=0, slots=1, environ=None, parents=None, **world):
    """Acquire in this process."""
    policy = LockPolicy(mode, wait_s, slots, None)
    directory = None if directory is None else str(directory)
    gpus = [Gpu(None, uuid, "", (parents or {}).get(uuid, "")) for uuid in uuids]
    world = gpu_locks.Surroundings(**{"say": lambda line: pytest.fail(f"it said: {line}"), **world})
    owner = lock_owner.this_process("train.py", "run-7")
    return gpu_locks.acquire(gpus, policy, owner, environ or {}, world, directory)


def files(held):
    """The lock files that are held, by name."""
    return [os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in held.descriptors()]


class Clock:
    """A clock that only sleeping moves."""

    now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@contextlib.contextmanager
def flock(path, *options):
    """util-linux flock holding a file until the block ends; yields its pid."""
    with subprocess.Popen(
        ["flock", *options, str(path), "sh", "-c", "echo held; cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        yield holder.pid
        holder.stdin.close()
