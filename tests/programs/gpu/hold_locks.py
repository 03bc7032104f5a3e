"""One run: it takes its locks as argv says, reports the result on stdout, and ends with stdin."""

# ruff: noqa: F401 - what argv gives to run uses these names
import fcntl
import json
import os
import pwd
import subprocess
import sys
import time

from saferun.errors import BusyError
from saferun.gpu.lock import gpu_locks, lock_dir, lock_owner
from saferun.model import Gpu
from saferun.settings import LockPolicy

job = json.loads(sys.argv[1])
if job["uid"]:
    os.setgroups([])
    os.setresgid(*[job["uid"]] * 3)
    os.setresuid(*[job["uid"]] * 3)
os.umask(0o077)
messages = []


def say(line):
    messages.append(line)
    if job["aloud"]:
        print(json.dumps({"messages": line}), flush=True)


exec(job["first"])
try:
    owner = lock_owner.this_process(job["command"], "run-7")
    policy = LockPolicy(**job["policy"], slot_memory_gib=None)
    gpus = [Gpu(None, uuid, "", job["parents"].get(uuid, "")) for uuid in job["uuids"]]
    held = gpu_locks.acquire(
        gpus, policy, owner, os.environ, gpu_locks.Surroundings(say), job["directory"]
    )
except BusyError as error:
    print(json.dumps({"busy": str(error), "messages": messages, "code": error.code}), flush=True)
    sys.exit(error.code)
files = " ".join(os.readlink(f"/proc/self/fd/{fd}") for fd in held.descriptors())
print(json.dumps({"held": files, "messages": messages, "environ": held.environ()}), flush=True)
exec(job["then"])
sys.stdin.read()
held.close()
